// Voxels to a block, byte for byte as libdvid-cpp writes them: sub-block tables ascending, the block's table in the order
// of (first sub-block, label), a volume of one label as the 24-byte solid form.
#pragma once

#include <algorithm>
#include <vector>

#include "block.hpp"

namespace dvid {

// A C-ordered view of uint64 voxels; x is contiguous, the strides are in voxels.
struct Volume {
  const std::uint64_t* origin;
  std::int64_t stride_z;
  std::int64_t stride_y;
  std::uint32_t grid[3];  // sub-blocks along x, y, z

  const std::uint64_t* line(std::int64_t z, std::int64_t y) const { return origin + z * stride_z + y * stride_y; }
};

namespace detail {

// Numbers labels in order of their first appearance. Open addressing, at most half full.
class Numbering {
  std::vector<std::uint64_t> keys_;
  std::vector<std::uint32_t> numbers_;  // number + 1; 0 where the slot is free
  std::vector<std::uint64_t> order_;
  unsigned shift_ = 0;  // leaves the top bits of a hash, as many as number the slots

  std::size_t slot(std::uint64_t label) const {
    const std::size_t mask = keys_.size() - 1;
    std::size_t at = static_cast<std::size_t>((label * 0x9E3779B97F4A7C15ull) >> shift_);
    while (numbers_[at] != 0 && keys_[at] != label) at = (at + 1) & mask;
    return at;
  }

  void resize(std::size_t n_slots) {
    keys_.assign(n_slots, 0);
    shift_ = 64 - static_cast<unsigned>(__builtin_ctzll(n_slots));
    numbers_.assign(n_slots, 0);
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const std::size_t at = slot(order_[i]);
      keys_[at] = order_[i];
      numbers_[at] = static_cast<std::uint32_t>(i + 1);
    }
  }

 public:
  explicit Numbering(std::size_t n_slots) { resize(n_slots); }

  std::uint32_t number(std::uint64_t label) {
    std::size_t at = slot(label);
    if (numbers_[at] == 0) {
      if (2 * (order_.size() + 1) > keys_.size()) {
        resize(2 * keys_.size());
        at = slot(label);
      }
      order_.push_back(label);
      keys_[at] = label;
      numbers_[at] = static_cast<std::uint32_t>(order_.size());
    }
    return numbers_[at] - 1;
  }

  void clear() {
    order_.clear();
    std::fill(numbers_.begin(), numbers_.end(), 0);
  }

  const std::vector<std::uint64_t>& order() const { return order_; }
};

// Appends 512 values of `bits` bits, the most significant bit first.
inline void pack(const std::uint16_t* values, unsigned bits, std::vector<std::uint8_t>& to) {
  std::uint32_t pending = 0;
  unsigned n_pending = 0;
  for (unsigned v = 0; v < kSubblockVoxels; ++v) {
    pending = (pending << bits) | values[v];
    n_pending += bits;
    while (n_pending >= 8) {
      n_pending -= 8;
      to.push_back(static_cast<std::uint8_t>(pending >> n_pending));
    }
    pending &= (1u << n_pending) - 1;
  }
}

template <class T>
inline void append(std::vector<std::uint8_t>& to, const T* values, std::size_t n) {
  if (n == 0) return;
  const std::size_t at = to.size();
  to.resize(at + n * sizeof(T));
  std::memcpy(to.data() + at, values, n * sizeof(T));
}

}  // namespace detail

inline std::vector<std::uint8_t> encode_block(const Volume& volume) {
  const std::uint64_t n_subblocks = std::uint64_t{volume.grid[0]} * volume.grid[1] * volume.grid[2];
  detail::Numbering block_labels(1024);
  detail::Numbering own_labels(2048);
  std::vector<std::uint16_t> counts;
  std::vector<std::uint32_t> indices;
  std::vector<std::uint8_t> packed;
  counts.reserve(n_subblocks);
  std::uint16_t values[kSubblockVoxels];
  std::uint16_t rank[kSubblockVoxels];
  std::vector<std::uint32_t> by_label;

  for (std::uint32_t sz = 0; sz < volume.grid[2]; ++sz)
    for (std::uint32_t sy = 0; sy < volume.grid[1]; ++sy)
      for (std::uint32_t sx = 0; sx < volume.grid[0]; ++sx) {
        own_labels.clear();
        std::uint64_t previous = 0;
        std::uint16_t number = 0;
        for (unsigned z = 0, v = 0; z < 8; ++z)
          for (unsigned y = 0; y < 8; ++y) {
            const std::uint64_t* line = volume.line(8 * std::int64_t{sz} + z, 8 * std::int64_t{sy} + y) + 8 * std::int64_t{sx};
            for (unsigned x = 0; x < 8; ++x, ++v) {
              if (v == 0 || line[x] != previous) {
                previous = line[x];
                number = static_cast<std::uint16_t>(own_labels.number(previous));
              }
              values[v] = number;
            }
          }
        const std::vector<std::uint64_t>& labels = own_labels.order();
        const unsigned count = static_cast<unsigned>(labels.size());
        by_label.resize(count);
        for (unsigned i = 0; i < count; ++i) by_label[i] = i;
        std::sort(by_label.begin(), by_label.end(), [&](auto a, auto b) { return labels[a] < labels[b]; });
        counts.push_back(static_cast<std::uint16_t>(count));
        for (unsigned i = 0; i < count; ++i) {
          rank[by_label[i]] = static_cast<std::uint16_t>(i);
          indices.push_back(block_labels.number(labels[by_label[i]]));
        }
        if (count >= 2) {
          for (std::uint16_t& value : values) value = rank[value];
          detail::pack(values, value_bits(count), packed);
        }
      }

  const std::vector<std::uint64_t>& table = block_labels.order();
  const std::uint32_t header[4] = {volume.grid[0], volume.grid[1], volume.grid[2], static_cast<std::uint32_t>(table.size())};
  std::vector<std::uint8_t> block;
  block.reserve(sizeof header + 8 * table.size() + 2 * counts.size() + 4 * indices.size() + packed.size());
  detail::append(block, header, 4);
  detail::append(block, table.data(), table.size());
  if (table.size() == 1) return block;
  detail::append(block, counts.data(), counts.size());
  detail::append(block, indices.data(), indices.size());
  detail::append(block, packed.data(), packed.size());
  return block;
}

}  // namespace dvid
