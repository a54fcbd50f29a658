// From a record, one row of a shard, to voxels: all checks that tell that it is the record that was asked for.
#pragma once

#include "arrow.hpp"
#include "decode.hpp"
#include "frame.hpp"

namespace dvid {

constexpr std::uint32_t kChunkGrid = 8;  // sub-blocks a side of a block of an export
constexpr std::uint32_t kMaxMetadataBytes = 1u << 20;

enum class View : std::uint8_t { labels, supervoxels };

// A message of one row, at the start of `bytes` and as long as they are.
struct RecordSource {
  Bytes bytes;
  std::int32_t xyz[3];  // coordinates that the record must have, in its own units
};

// Whether this core can decode the message by itself: a body that Arrow compressed is undone elsewhere.
enum class Handled : std::uint8_t { yes, compressed_body };

inline Handled decode_record(const RecordSource& source, const Layout& layout, View view, FrameReader& frames, const Window& window,
                             const Output& out) {
  const Bytes& bytes = source.bytes;
  if (bytes.get<std::uint32_t>("message", 0) != 0xFFFFFFFF) throw Fault("message", "must start with FFFFFFFF", 0, 0, 0);
  const std::uint32_t metadata_bytes = bytes.get<std::uint32_t>("message", 4);
  if (metadata_bytes > kMaxMetadataBytes) throw Fault("metadata", "is too long", 4, kMaxMetadataBytes, metadata_bytes);
  const Bytes metadata = bytes.part("metadata", 8, metadata_bytes);
  const Bytes body = bytes.part("body", 8 + std::uint64_t{metadata_bytes}, bytes.size - 8 - metadata_bytes);
  const Message message = parse_message(metadata);
  if (message.kind == MessageKind::record_batch && message.codec != BodyCodec::none) return Handled::compressed_body;
  if (message.n_rows != 1) throw Fault("rows", "must be one", 0, 1, message.n_rows);
  const Row row = parse_row(message, body, layout, 0);
  if (row.x != source.xyz[0] || row.y != source.xyz[1] || row.z != source.xyz[2])
    throw Fault("coordinates", "are those of another chunk", 0, 0, 0);

  Bytes plain = body.part("block", row.block.offset_bytes, row.block.size_bytes);
  if (is_frame(plain)) plain = frames.read(plain, largest_block(kChunkGrid * kChunkGrid * kChunkGrid));
  if (row.uncompressed_size >= 0 && plain.size != static_cast<std::uint64_t>(row.uncompressed_size))
    throw Fault("uncompressed_size", "must be the block's", 0, plain.size, static_cast<std::uint64_t>(row.uncompressed_size));
  const Block block = parse_block(plain);
  for (const std::uint32_t side : block.grid)
    if (side != kChunkGrid) throw Fault("block", "must be of 64^3 voxels", 0, kChunkGrid, side);
  const std::uint64_t table_bytes = 8 * std::uint64_t{block.n_labels};
  if (row.labels.size_bytes != table_bytes) throw Fault("labels", "must be as many as the block has", 0, table_bytes, row.labels.size_bytes);
  if (row.supervoxels.size_bytes != table_bytes ||
      std::memcmp(body.data + row.supervoxels.offset_bytes, block.labels, table_bytes) != 0)
    throw Fault("supervoxels", "must be the block's label table", 0, table_bytes, row.supervoxels.size_bytes);
  decode_block(block, view == View::labels ? body.data + row.labels.offset_bytes : block.labels, window, out);
  return Handled::yes;
}

}  // namespace dvid
