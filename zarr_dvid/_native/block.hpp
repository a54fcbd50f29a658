// DVID's compressed label block: the strict parser.
//
// Layout (DVID datatype/common/labels/compressed.go): gx, gy, gz, N as uint32; N labels as uint64; and if N >= 2 a
// uint16 count for each 8x8x8 sub-block, the sub-blocks' uint32 indices into the label table, and their values, 512 of
// b = ceil(log2(count)) bits each, most significant bit first. x runs fastest, then y, then z, in both orders.
#pragma once

#include "bytes.hpp"

namespace dvid {

constexpr std::uint64_t kSubblockVoxels = 512;
constexpr std::uint32_t kMaxGrid = 128;
constexpr std::uint64_t kHeaderBytes = 16;

struct Block {
  std::uint32_t grid[3] = {0, 0, 0};  // sub-blocks along x, y, z
  std::uint32_t n_labels = 0;
  std::uint64_t n_subblocks = 0;
  const std::uint8_t* labels = nullptr;   // n_labels uint64
  const std::uint8_t* counts = nullptr;   // n_subblocks uint16; null in a solid block, as all that follows
  const std::uint8_t* indices = nullptr;  // uint32
  const std::uint8_t* values = nullptr;
  const std::uint8_t* data = nullptr;     // the whole block
  const std::uint8_t* end = nullptr;
  std::uint64_t n_indices = 0;

  bool solid() const { return counts == nullptr; }
};

inline unsigned value_bits(unsigned count) {
  return count < 2 ? 0u : 32u - static_cast<unsigned>(__builtin_clz(count - 1));
}

// The legacy solid form (DVID until 977f8050, 2018-04-06) still has counts of 1 and indices of 0 behind its label.
inline void check_legacy_solid(const Bytes& bytes, std::uint64_t n_subblocks) {
  for (std::uint64_t s = 0; s < n_subblocks; ++s) {
    const std::uint64_t at = 24 + 2 * s;
    const std::uint16_t count = load<std::uint16_t>(bytes.data + at);
    if (count != 1) throw Fault("counts", "of a solid block must be 1", at, 1, count);
  }
  for (std::uint64_t s = 0; s < n_subblocks; ++s) {
    const std::uint64_t at = 24 + 2 * n_subblocks + 4 * s;
    const std::uint32_t index = load<std::uint32_t>(bytes.data + at);
    if (index != 0) throw Fault("indices", "of a solid block must be 0", at, 0, index);
  }
}

// Checks all but the packed values (rule 7), which are checked where they are decoded.
inline Block parse_block(Bytes bytes) {
  if (bytes.size < 24) throw Fault("block", "is shorter than the shortest block", 0, 24, bytes.size);
  Block block;
  static const char* const kAxis[3] = {"gx", "gy", "gz"};
  for (unsigned d = 0; d < 3; ++d) {
    block.grid[d] = load<std::uint32_t>(bytes.data + 4 * d);
    if (block.grid[d] == 0 || block.grid[d] > kMaxGrid)
      throw Fault(kAxis[d], "is no number of sub-blocks", 4 * d, kMaxGrid, block.grid[d]);
  }
  block.n_subblocks = std::uint64_t{block.grid[0]} * block.grid[1] * block.grid[2];
  block.n_labels = load<std::uint32_t>(bytes.data + 12);
  if (block.n_labels == 0) throw Fault("N", "must not be 0 labels", 12, 1, 0);
  if (block.n_labels > kSubblockVoxels * block.n_subblocks)
    throw Fault("N", "must not exceed the voxels of the block", 12, kSubblockVoxels * block.n_subblocks, block.n_labels);
  const std::uint64_t counts_at = kHeaderBytes + 8 * std::uint64_t{block.n_labels};
  bytes.require("label table", kHeaderBytes, 8 * std::uint64_t{block.n_labels});
  block.labels = bytes.data + kHeaderBytes;
  block.data = bytes.data;
  block.end = bytes.data + bytes.size;

  const std::uint64_t n = block.n_subblocks;
  if (block.n_labels == 1) {
    if (bytes.size == 24) return block;
    if (bytes.size != 24 + 6 * n) throw Fault("block", "of one label has bytes behind its label", 24, 24, bytes.size);
    check_legacy_solid(bytes, n);
    return block;
  }

  bytes.require("counts", counts_at, 2 * n);
  block.counts = bytes.data + counts_at;
  std::uint64_t value_bytes = 0;
  for (std::uint64_t s = 0; s < n; ++s) {
    const std::uint16_t count = load<std::uint16_t>(block.counts + 2 * s);
    if (count > kSubblockVoxels)
      throw Fault("counts", "must not exceed the voxels of a sub-block", counts_at + 2 * s, kSubblockVoxels, count);
    block.n_indices += count;
    value_bytes += 64 * value_bits(count);
  }
  const std::uint64_t indices_at = counts_at + 2 * n;
  bytes.require("indices", indices_at, 4 * block.n_indices);
  block.indices = bytes.data + indices_at;
  const std::uint64_t values_at = indices_at + 4 * block.n_indices;
  bytes.require("values", values_at, value_bytes);
  block.values = bytes.data + values_at;
  if (bytes.size != values_at + value_bytes)
    throw Fault("block", "has bytes behind its values", values_at + value_bytes, values_at + value_bytes, bytes.size);

  std::uint32_t largest = 0;
  for (std::uint64_t i = 0; i < block.n_indices; ++i) {
    const std::uint32_t index = load<std::uint32_t>(block.indices + 4 * i);
    largest = index > largest ? index : largest;
  }
  if (largest >= block.n_labels) {
    std::uint64_t i = 0;
    while (load<std::uint32_t>(block.indices + 4 * i) < block.n_labels) ++i;
    throw Fault("indices", "must be less than N", indices_at + 4 * i, block.n_labels - 1,
                load<std::uint32_t>(block.indices + 4 * i));
  }
  return block;
}

}  // namespace dvid
