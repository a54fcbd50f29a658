// Zstandard frames around blocks. What a frame may hold is bounded before memory is taken for it.
#pragma once

#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

#include <algorithm>
#include <memory>
#include <new>

#include "block.hpp"

namespace dvid {

constexpr std::uint32_t kFrameMagic = 0xFD2FB528;
constexpr std::uint64_t kMaxWindowBytes = 8u << 20;  // what zstd asks all decoders to support

inline bool is_frame(const Bytes& bytes) { return bytes.size >= 4 && load<std::uint32_t>(bytes.data) == kFrameMagic; }

// The size of the largest block of a grid: the one whose voxels all differ.
inline std::uint64_t largest_block(std::uint64_t n_subblocks) {
  return kHeaderBytes + n_subblocks * (8 * kSubblockVoxels + 2 + 4 * kSubblockVoxels + 64 * 9);
}

// Length of the frame that these bytes start with; 0 where there is no whole one.
inline std::uint64_t frame_bytes(const Bytes& bytes) {
  const std::size_t size = ZSTD_findFrameCompressedSize(bytes.data, bytes.size);
  return ZSTD_isError(size) ? 0 : size;
}

// Decompresses frames, one after another, into memory of its own. Not to be shared between threads.
class FrameReader {
  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };
  std::unique_ptr<ZSTD_DCtx, Free> context_;
  std::unique_ptr<std::uint8_t[]> plain_;
  std::uint64_t capacity_ = 0;

 public:
  // The content of `frame`, which must be one frame and nothing behind it, of at most `limit` bytes; valid until the next call.
  Bytes read(const Bytes& frame, std::uint64_t limit) {
    ZSTD_frameHeader header;
    if (ZSTD_getFrameHeader(&header, frame.data, frame.size) != 0) throw Fault("zstd frame", "is broken", 0, 0, 0);
    const bool stated = header.frameContentSize != ZSTD_CONTENTSIZE_UNKNOWN;
    if (stated && header.frameContentSize > limit)
      throw Fault("zstd frame", "holds more than a block can be", 4, limit, header.frameContentSize);
    if (!stated && header.windowSize > kMaxWindowBytes)
      throw Fault("zstd frame", "has too large a window", 4, kMaxWindowBytes, header.windowSize);
    if (frame_bytes(frame) != frame.size)
      throw Fault("zstd frame", "must be one, with nothing behind it", 0, frame.size, 0);
    const std::uint64_t needed = std::max<std::uint64_t>(1, stated ? header.frameContentSize : limit);
    if (needed > capacity_) {
      plain_.reset(new std::uint8_t[needed]);
      capacity_ = needed;
    }
    if (!context_) context_.reset(ZSTD_createDCtx());
    if (!context_) throw std::bad_alloc();
    const std::size_t size = ZSTD_decompressDCtx(context_.get(), plain_.get(), needed, frame.data, frame.size);
    if (ZSTD_isError(size)) throw Fault("zstd frame", "is broken", 0, 0, 0);
    return {plain_.get(), size};
  }
};

}  // namespace dvid
