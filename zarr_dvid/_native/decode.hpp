// From a parsed block to voxels, a window at a time, straight into a strided output.
#pragma once

#include "block.hpp"
#include "rows.hpp"

namespace dvid {

// Voxels of a block, half open: x0 <= x < x1 and so on.
struct Window {
  std::uint32_t z0, z1, y0, y1, x0, x1;

  bool empty() const { return z0 >= z1 || y0 >= y1 || x0 >= x1; }
};

// Where voxel (z0, y0, x0) of the window goes; x is contiguous, the strides are in voxels.
struct Output {
  std::uint64_t* origin;
  std::int64_t stride_z;
  std::int64_t stride_y;

  std::uint64_t* line(std::int64_t z, std::int64_t y) const { return origin + z * stride_z + y * stride_y; }
};

namespace detail {

inline unsigned value_at(const std::uint8_t* values, unsigned bits, unsigned v) {
  const unsigned first = v * bits;
  const unsigned next = first % 8 + bits > 8 ? values[first / 8 + 1] : 0u;
  return (((unsigned{values[first / 8]} << 8) | next) >> (16 - first % 8 - bits)) & ((1u << bits) - 1);
}

// The part of a window that lies in sub-block `s` of an axis, 0..8, half open.
inline unsigned low(std::uint32_t from, std::uint32_t s) { return from > 8 * s ? from - 8 * s : 0u; }
inline unsigned high(std::uint32_t to, std::uint32_t s) { return to < 8 * s + 8 ? to - 8 * s : 8u; }

// Up to 8 neighbouring sub-blocks along x, with their tables of labels.
class Strip {
  static constexpr unsigned kWidth = 8;
  // Entries past a sub-block's count are left over from others: only values that are refused look there.
  std::uint64_t tables_[kWidth][kSubblockVoxels] = {};
  std::uint8_t tail_[64 * kMaxBits + 8];
  Subblock subblocks_[kWidth];
  std::uint64_t values_at_[kWidth];
  std::uint32_t sx_ = 0;  // of the first one
  unsigned n_ = 0;

  void refuse() const {
    for (unsigned k = 0; k < n_; ++k)
      for (unsigned v = 0; v < kSubblockVoxels; ++v)
        if (subblocks_[k].bits != 0 && value_at(subblocks_[k].values, subblocks_[k].bits, v) >= subblocks_[k].count)
          throw Fault("values", "must be less than their sub-block's count", values_at_[k] + v * subblocks_[k].bits / 8,
                      subblocks_[k].count - 1, value_at(subblocks_[k].values, subblocks_[k].bits, v));
  }

 public:
  bool full() const { return n_ == kWidth; }

  void add(const Block& block, const std::uint8_t* labels, std::uint32_t sx, unsigned count, const std::uint8_t* indices,
           const std::uint8_t* values) {
    const unsigned bits = value_bits(count);
    std::uint64_t* table = tables_[n_];
    for (unsigned i = 0; i < count; ++i)
      table[i] = load<std::uint64_t>(labels + 8 * std::uint64_t{load<std::uint32_t>(indices + 4 * i)});
    if (count == 0) table[0] = 0;  // reads as label 0
    for (unsigned i = 1u << bits; i < 8; ++i) table[i] = table[i - (1u << bits)];
    values_at_[n_] = static_cast<std::uint64_t>(values - block.data);
    const std::uint64_t left = static_cast<std::uint64_t>(block.end - values);
    if (left < 64 * bits + 8) {  // rows are read 8 bytes at a time: the last ones from a longer copy
      std::memcpy(tail_, values, 64 * bits);
      values = tail_;
    }
    if (n_ == 0) sx_ = sx;
    subblocks_[n_++] = Subblock{values, table, bits, count};
  }

  // Writes the part of the sub-blocks (of row sy, plane sz) that lies in the window, and empties the strip.
  void flush(StripKernel whole, std::uint32_t sz, std::uint32_t sy, const Window& w, const Output& out) {
    const unsigned z0 = low(w.z0, sz), z1 = high(w.z1, sz), y0 = low(w.y0, sy), y1 = high(w.y1, sy);
    const unsigned x0 = low(w.x0, sx_), x1 = high(w.x1, sx_ + n_ - 1);
    std::uint64_t* origin =
        out.line(8 * std::int64_t{sz} + z0 - w.z0, 8 * std::int64_t{sy} + y0 - w.y0) + (8 * std::int64_t{sx_} + x0 - w.x0);
    std::uint64_t bad = 0;
    if (z1 - z0 == 8 && y1 - y0 == 8 && x0 == 0 && x1 == 8) {
      bad = whole(subblocks_, n_, origin, out.stride_z, out.stride_y);
    } else {
      for (unsigned z = z0; z < z1; ++z)
        for (unsigned y = y0; y < y1; ++y) {
          std::uint64_t* to = origin + (z - z0) * out.stride_z + (y - y0) * out.stride_y;
          for (unsigned k = 0; k < n_; ++k) {
            const unsigned from = k == 0 ? x0 : 0, until = k + 1 == n_ ? x1 : 8;
            std::uint64_t row[8];
            bad |= decode_row(subblocks_[k], 8 * z + y, row);
            std::memcpy(to, row + from, 8 * (until - from));
            to += until - from;
          }
        }
    }
    if (bad != 0) refuse();
    n_ = 0;
  }
};

inline void fill(std::uint64_t label, const Window& w, const Output& out) {
  for (std::uint32_t z = 0; z < w.z1 - w.z0; ++z)
    for (std::uint32_t y = 0; y < w.y1 - w.y0; ++y) {
      std::uint64_t* line = out.line(z, y);
      for (std::uint32_t x = 0; x < w.x1 - w.x0; ++x) line[x] = label;
    }
}

}  // namespace detail

// Decodes `window` of `block`. `labels` (block.n_labels uint64, unaligned) is the label table to use: the block's own or
// one that stands in for it. A sub-block outside the window costs its count alone; the rows inside are checked value by
// value.
inline void decode_block(const Block& block, const std::uint8_t* labels, const Window& w, const Output& out) {
  if (w.empty()) return;
  if (block.solid()) return detail::fill(load<std::uint64_t>(labels), w, out);

  const StripKernel whole = strip_kernel();
  detail::Strip strip;
  const std::uint8_t* counts = block.counts;
  const std::uint8_t* indices = block.indices;
  const std::uint8_t* values = block.values;
  for (std::uint32_t sz = 0; 8 * sz < w.z1; ++sz)
    for (std::uint32_t sy = 0; sy < block.grid[1]; ++sy) {
      const bool inside_zy = 8 * sz + 8 > w.z0 && 8 * sy + 8 > w.y0 && 8 * sy < w.y1;
      for (std::uint32_t sx = 0; sx < block.grid[0]; ++sx, counts += 2) {
        const unsigned count = load<std::uint16_t>(counts);
        if (inside_zy && 8 * sx + 8 > w.x0 && 8 * sx < w.x1) {
          if (strip.full()) strip.flush(whole, sz, sy, w, out);
          strip.add(block, labels, sx, count, indices, values);
        }
        indices += 4 * std::uint64_t{count};
        values += 64 * std::uint64_t{value_bits(count)};
      }
      if (inside_zy) strip.flush(whole, sz, sy, w, out);
    }
}

}  // namespace dvid
