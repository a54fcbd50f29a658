// Arrow IPC messages (schema and record batch), parsed with every offset checked before it is followed.
//
// Follows Arrow's format/Message.fbs and Schema.fbs. A message is FFFFFFFF, an int32 metadata length, the metadata (a
// flatbuffer `Message`) and the body. These parsers see the metadata alone, or the metadata and the body.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bytes.hpp"

namespace dvid {

// A flatbuffer table. `at` is its position; a field that is absent has position 0.
class Table {
  Bytes buffer_;
  std::uint64_t at_;
  std::uint64_t vtable_;
  std::uint64_t vtable_bytes_;

 public:
  Table(Bytes buffer, std::uint64_t at) : buffer_(buffer), at_(at) {
    const std::int64_t vtable = static_cast<std::int64_t>(at) - buffer.get<std::int32_t>("flatbuffer table", at);
    if (vtable < 0) throw Fault("flatbuffer vtable", "lies before the metadata", at, 0, static_cast<std::uint64_t>(-vtable));
    vtable_ = static_cast<std::uint64_t>(vtable);
    vtable_bytes_ = buffer.get<std::uint16_t>("flatbuffer vtable", vtable_);
    buffer.require("flatbuffer vtable", vtable_, vtable_bytes_);
  }

  std::uint64_t field(unsigned index) const {
    const std::uint64_t slot = 4 + 2 * std::uint64_t{index};
    if (slot + 2 > vtable_bytes_) return 0;
    const std::uint16_t offset = load<std::uint16_t>(buffer_.data + vtable_ + slot);
    return offset == 0 ? 0 : at_ + offset;
  }

  template <class T>
  T scalar(unsigned index, T missing) const {
    const std::uint64_t at = field(index);
    return at == 0 ? missing : buffer_.get<T>("flatbuffer field", at);
  }

  // Where the offset in this field points to; 0 where there is none.
  std::uint64_t target(unsigned index) const {
    const std::uint64_t at = field(index);
    return at == 0 ? 0 : at + buffer_.get<std::uint32_t>("flatbuffer offset", at);
  }

  Table child(const char* name, unsigned index) const {
    const std::uint64_t at = target(index);
    if (at == 0) throw Fault(name, "is missing", at_, 1, 0);
    return Table(buffer_, at);
  }

  // Position and length of a vector of `element_bytes`-sized elements; (0, 0) where there is none.
  std::pair<std::uint64_t, std::uint64_t> vector(const char* name, unsigned index, std::uint64_t element_bytes) const {
    const std::uint64_t at = target(index);
    if (at == 0) return {0, 0};
    const std::uint64_t n = buffer_.get<std::uint32_t>(name, at);
    buffer_.require(name, at + 4, n * element_bytes);
    return {at + 4, n};
  }

  std::string string(const char* name, unsigned index) const {
    const auto [at, n] = vector(name, index, 1);
    return std::string(reinterpret_cast<const char*>(buffer_.data + at), n);
  }

  Bytes buffer() const { return buffer_; }
};

enum class MessageKind : std::uint8_t { schema = 1, dictionary = 2, record_batch = 3 };
enum class BodyCodec : std::int8_t { none = -1, lz4_frame = 0, zstd = 1 };

struct Extent {
  std::uint64_t offset_bytes;  // from the start of the body
  std::uint64_t size_bytes;
};

struct Node {
  std::uint64_t length;
  std::uint64_t null_count;
};

struct Message {
  MessageKind kind;
  std::uint64_t body_bytes = 0;
  // of a record batch:
  std::uint64_t n_rows = 0;
  BodyCodec codec = BodyCodec::none;
  std::vector<Node> nodes;
  std::vector<Extent> buffers;
};

inline std::uint64_t not_negative(const char* name, std::uint64_t at, std::int64_t value) {
  if (value < 0) throw Fault(name, "is negative", at, 0, static_cast<std::uint64_t>(value));
  return static_cast<std::uint64_t>(value);
}

inline Table message_table(Bytes metadata) {
  return Table(metadata, metadata.get<std::uint32_t>("flatbuffer root", 0));
}

inline Message parse_message(Bytes metadata) {
  const Table table = message_table(metadata);
  const std::int16_t version = table.scalar<std::int16_t>(0, 0);
  if (version != 3 && version != 4) throw Fault("metadata version", "must be V4 (3) or V5 (4)", 0, 4, static_cast<std::uint16_t>(version));
  Message message;
  const std::uint8_t kind = table.scalar<std::uint8_t>(1, 0);
  if (kind < 1 || kind > 3) throw Fault("message type", "must be a schema (1) or a record batch (3)", 0, 3, kind);
  message.kind = static_cast<MessageKind>(kind);
  message.body_bytes = not_negative("body length", 0, table.scalar<std::int64_t>(3, 0));
  if (message.kind != MessageKind::record_batch) return message;

  const Table batch = table.child("record batch", 2);
  message.n_rows = not_negative("rows", 0, batch.scalar<std::int64_t>(0, 0));
  const auto [nodes_at, n_nodes] = batch.vector("field nodes", 1, 16);
  for (std::uint64_t i = 0; i < n_nodes; ++i) {
    const std::uint8_t* at = metadata.data + nodes_at + 16 * i;
    message.nodes.push_back({not_negative("node length", nodes_at + 16 * i, load<std::int64_t>(at)),
                             not_negative("null count", nodes_at + 16 * i + 8, load<std::int64_t>(at + 8))});
  }
  const auto [buffers_at, n_buffers] = batch.vector("buffers", 2, 16);
  for (std::uint64_t i = 0; i < n_buffers; ++i) {
    const std::uint8_t* at = metadata.data + buffers_at + 16 * i;
    const Extent extent{not_negative("buffer offset", buffers_at + 16 * i, load<std::int64_t>(at)),
                        not_negative("buffer length", buffers_at + 16 * i + 8, load<std::int64_t>(at + 8))};
    if (extent.offset_bytes > message.body_bytes || extent.size_bytes > message.body_bytes - extent.offset_bytes)
      throw Fault("buffer", "would run past the end of the body", buffers_at + 16 * i, message.body_bytes,
                  extent.offset_bytes + extent.size_bytes);
    // Every writer lays buffers out one behind the other, padded to 8 or 64 bytes. Offsets that do anything else would
    // show one buffer's bytes as another's.
    const std::uint64_t end = message.buffers.empty() ? 0 : message.buffers.back().offset_bytes + message.buffers.back().size_bytes;
    if (extent.offset_bytes % 8 != 0 || extent.offset_bytes < end || extent.offset_bytes - end >= 64)
      throw Fault("buffer", "must follow the one before", buffers_at + 16 * i, end, extent.offset_bytes);
    message.buffers.push_back(extent);
  }
  if (batch.field(3) != 0) {
    const Table compression = batch.child("body compression", 3);
    const std::int8_t codec = compression.scalar<std::int8_t>(0, 0);
    if (codec != 0 && codec != 1) throw Fault("body compression", "must be LZ4 frames (0) or zstd (1)", 0, 1, static_cast<std::uint8_t>(codec));
    const std::int8_t method = compression.scalar<std::int8_t>(1, 0);
    if (method != 0) throw Fault("body compression method", "must be by buffer (0)", 0, 0, static_cast<std::uint8_t>(method));
    message.codec = static_cast<BodyCodec>(codec);
  }
  return message;
}

// A field of a schema, as far as a reader of label blocks has to know it.
struct Field {
  std::string name;
  std::uint8_t type = 0;  // org.apache.arrow.flatbuf.Type
  std::int32_t bit_width = 0;
  bool is_signed = false;
  bool has_dictionary = false;
  std::vector<Field> children;
  std::vector<std::pair<std::string, std::string>> metadata;
};

constexpr unsigned kMaxNesting = 8;
constexpr std::uint64_t kMaxFields = 256;  // of one field or schema
constexpr std::uint8_t kTypeInt = 2;

inline std::vector<Field> parse_fields(const Table& parent, unsigned index, unsigned depth) {
  if (depth > kMaxNesting) throw Fault("schema", "is nested too deeply", 0, kMaxNesting, depth);
  const auto [at, n] = parent.vector("fields", index, 4);
  if (n > kMaxFields) throw Fault("schema", "has too many fields", at, kMaxFields, n);
  std::vector<Field> fields;
  for (std::uint64_t i = 0; i < n; ++i) {
    const std::uint64_t slot = at + 4 * i;
    const Table table(parent.buffer(), slot + load<std::uint32_t>(parent.buffer().data + slot));
    Field field;
    field.name = table.string("field name", 0);
    field.type = table.scalar<std::uint8_t>(2, 0);
    if (field.type == kTypeInt) {
      const Table type = table.child("integer type", 3);
      field.bit_width = type.scalar<std::int32_t>(0, 0);
      field.is_signed = type.scalar<std::uint8_t>(1, 0) != 0;
    }
    field.has_dictionary = table.field(4) != 0;
    field.children = parse_fields(table, 5, depth + 1);
    const auto [pairs_at, n_pairs] = table.vector("field metadata", 6, 4);
    if (n_pairs > kMaxFields) throw Fault("field metadata", "has too many entries", pairs_at, kMaxFields, n_pairs);
    for (std::uint64_t k = 0; k < n_pairs; ++k) {
      const std::uint64_t pair = pairs_at + 4 * k;
      const Table entry(parent.buffer(), pair + load<std::uint32_t>(parent.buffer().data + pair));
      field.metadata.emplace_back(entry.string("metadata key", 0), entry.string("metadata value", 1));
    }
    fields.push_back(std::move(field));
  }
  return fields;
}

inline std::vector<Field> parse_schema(Bytes metadata) {
  const Table message = message_table(metadata);
  if (message.scalar<std::uint8_t>(1, 0) != 1) throw Fault("message type", "must be a schema (1)", 0, 1, message.scalar<std::uint8_t>(1, 0));
  const Table schema = message.child("schema", 2);
  if (schema.scalar<std::int16_t>(0, 0) != 0) throw Fault("schema", "must be little-endian (0)", 0, 0, 1);
  return parse_fields(schema, 1, 0);
}

// Where a column's field node and first buffer are, and whether its offsets are int64 (large lists and binaries).
struct Column {
  std::int32_t node = -1;
  std::int32_t buffer = -1;
  bool large = false;

  bool present() const { return node >= 0; }
};

struct Layout {
  std::uint64_t n_nodes = 0;
  std::uint64_t n_buffers = 0;
  Column x, y, z, labels, supervoxels, block, uncompressed_size;
};

// One row; extents are within the body, those of labels and supervoxels whole uint64s.
struct Row {
  std::int32_t x, y, z;
  Extent labels, supervoxels, block;
  std::int64_t uncompressed_size;  // -1 where the column does not exist
};

namespace detail {

struct RowReader {
  const Message& message;
  Bytes body;
  std::uint64_t row;

  const Node& node(const char* name, std::int32_t index, std::uint64_t length) const {
    const Node& n = message.nodes[static_cast<std::size_t>(index)];
    if (n.length != length) throw Fault(name, "must have as many values as the batch has rows", 0, length, n.length);
    if (n.null_count != 0) throw Fault(name, "must have no nulls", 0, 0, n.null_count);
    return n;
  }

  // `n` elements of buffer `index`, from element `first` on.
  Extent slice(const char* name, std::int32_t index, std::uint64_t first, std::uint64_t n, std::uint64_t element_bytes) const {
    const Extent& buffer = message.buffers[static_cast<std::size_t>(index)];
    const std::uint64_t available = buffer.size_bytes / element_bytes;
    if (first > available || n > available - first)
      throw Fault(name, "would run past the end of its buffer", buffer.offset_bytes, first + n, available);
    return {buffer.offset_bytes + first * element_bytes, n * element_bytes};
  }

  template <class T>
  T value(const char* name, const Column& column) const {
    node(name, column.node, message.n_rows);
    return body.get<T>(name, slice(name, column.buffer + 1, row, 1, sizeof(T)).offset_bytes);
  }

  std::pair<std::uint64_t, std::uint64_t> offsets(const char* name, const Column& column) const {
    node(name, column.node, message.n_rows);
    const std::uint64_t width = column.large ? 8 : 4;
    const Extent pair = slice(name, column.buffer + 1, row, 2, width);
    const auto read = [&](std::uint64_t at) {
      return column.large ? body.get<std::int64_t>(name, at) : std::int64_t{body.get<std::int32_t>(name, at)};
    };
    const std::uint64_t from = not_negative(name, pair.offset_bytes, read(pair.offset_bytes));
    const std::uint64_t until = not_negative(name, pair.offset_bytes, read(pair.offset_bytes + width));
    if (until < from) throw Fault(name, "has offsets that decrease", pair.offset_bytes, from, until);
    return {from, until};
  }

  Extent list(const char* name, const Column& column) const {
    const auto [from, until] = offsets(name, column);
    const Node& items = message.nodes[static_cast<std::size_t>(column.node) + 1];
    if (until > items.length) throw Fault(name, "has offsets past its items", 0, items.length, until);
    if (items.null_count != 0) throw Fault(name, "must have no nulls", 0, 0, items.null_count);
    return slice(name, column.buffer + 3, from, until - from, 8);
  }

  Extent binary(const char* name, const Column& column) const {
    const auto [from, until] = offsets(name, column);
    return slice(name, column.buffer + 2, from, until - from, 1);
  }
};

}  // namespace detail

inline void check_layout(const Message& message, const Layout& layout) {
  if (message.nodes.size() != layout.n_nodes)
    throw Fault("field nodes", "must be as many as in the schema", 0, layout.n_nodes, message.nodes.size());
  if (message.buffers.size() != layout.n_buffers)
    throw Fault("buffers", "must be as many as in the schema", 0, layout.n_buffers, message.buffers.size());
}

// The buffers of chunk_x, chunk_y and chunk_z: n_rows int32 each, compressed if the message is.
inline std::vector<Extent> coordinate_buffers(const Message& message, const Layout& layout) {
  check_layout(message, layout);
  const detail::RowReader read{message, {}, 0};
  std::vector<Extent> extents;
  for (const Column* column : {&layout.x, &layout.y, &layout.z}) {
    read.node("chunk coordinates", column->node, message.n_rows);
    const Extent& buffer = message.buffers[static_cast<std::size_t>(column->buffer) + 1];
    if (message.codec == BodyCodec::none && buffer.size_bytes / 4 < message.n_rows)
      throw Fault("chunk coordinates", "must be as many as the batch has rows", buffer.offset_bytes, message.n_rows, buffer.size_bytes / 4);
    extents.push_back(buffer);
  }
  return extents;
}

// Row `row` of an uncompressed record batch. `layout` must have come from the batch's schema.
inline Row parse_row(const Message& message, Bytes body, const Layout& layout, std::uint64_t row) {
  if (message.kind != MessageKind::record_batch) throw Fault("message type", "must be a record batch (3)", 0, 3, static_cast<std::uint8_t>(message.kind));
  if (message.codec != BodyCodec::none) throw Fault("body compression", "must have been undone", 0, 0, 1);
  if (body.size != message.body_bytes) throw Fault("body", "must be as long as its message says", 0, message.body_bytes, body.size);
  check_layout(message, layout);
  if (row >= message.n_rows) throw Fault("row", "is past the end of its batch", 0, message.n_rows, row);
  const detail::RowReader read{message, body, row};
  return Row{read.value<std::int32_t>("chunk_x", layout.x),
             read.value<std::int32_t>("chunk_y", layout.y),
             read.value<std::int32_t>("chunk_z", layout.z),
             read.list("labels", layout.labels),
             read.list("supervoxels", layout.supervoxels),
             read.binary("dvid_compressed_block", layout.block),
             layout.uncompressed_size.present()
                 ? std::int64_t{read.value<std::uint32_t>("uncompressed_size", layout.uncompressed_size)}
                 : -1};
}

}  // namespace dvid
