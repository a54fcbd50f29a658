// The inner loops of the decoder: rows of 8 packed values to rows of 8 labels.
//
// Portable code, and AVX-512 code for the x86-64 processors that have it, chosen once at run time. All of it also tells
// whether it met a value >= count, which only a broken block has.
#pragma once

#include "block.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define ZARR_DVID_AVX512 1
#include <immintrin.h>
#endif

namespace dvid {

constexpr unsigned kMaxBits = 9;

// One sub-block, ready to be decoded. `table` has room for, and initialised labels up to, max(8, 2^bits) entries.
// 8 bytes may be read from the start of each row of values.
struct Subblock {
  const std::uint8_t* values;
  const std::uint64_t* table;
  unsigned bits;
  unsigned count;
};

namespace detail {

constexpr std::uint64_t repeat4(std::uint64_t lane, unsigned step) {
  return lane | lane << step | lane << 2 * step | lane << 3 * step;
}

inline std::uint64_t big_endian(const std::uint8_t* at) { return __builtin_bswap64(load<std::uint64_t>(at)); }

// Adding 2^Bits - count to a value >= count carries into the bit above it, which a lane of 2*Bits has free.
template <unsigned Bits>
struct Overflow {
  static constexpr std::uint64_t kLanes = repeat4((1u << Bits) - 1, 2 * Bits);
  static constexpr std::uint64_t kCarries = repeat4(1u << Bits, 2 * Bits);
  const std::uint64_t headroom;
  std::uint64_t sums = 0;

  explicit Overflow(unsigned count) : headroom(repeat4((1u << Bits) - count, 2 * Bits)) {}

  void check(std::uint64_t row) {  // the row's 8 values, in its low 8*Bits bits
    sums |= (row & kLanes) + headroom;
    sums |= ((row >> Bits) & kLanes) + headroom;
  }

  std::uint64_t seen() const { return sums & kCarries; }
};

// Each of these decodes `Rows` rows, from row `first` of the sub-block on, to out, out + stride, ...
template <unsigned Rows>
inline std::uint64_t uniform_rows(const Subblock& s, std::uint64_t* out, std::int64_t stride) {
  const std::uint64_t label = s.table[0];
  for (unsigned r = 0; r < Rows; ++r, out += stride)
    for (unsigned x = 0; x < 8; ++x) out[x] = label;
  return 0;
}

template <unsigned Bits, unsigned Rows>
inline std::uint64_t rows(const Subblock& s, unsigned first, std::uint64_t* out, std::int64_t stride) {
  Overflow<Bits> overflow(s.count);
  const std::uint8_t* at = s.values + first * Bits;
  for (unsigned r = 0; r < Rows; ++r, at += Bits, out += stride) {
    const std::uint64_t row = big_endian(at) >> (64 - 8 * Bits);
    overflow.check(row);
    for (unsigned x = 0; x < 8; ++x) out[x] = s.table[(row >> (Bits * (7 - x))) & ((1u << Bits) - 1)];
  }
  return overflow.seen();
}

// Nine bits: a row is 72 bits long, the ninth byte holds most of its last value.
template <unsigned Rows>
inline std::uint64_t nine_bit_rows(const Subblock& s, unsigned first, std::uint64_t* out, std::int64_t stride) {
  std::uint64_t seen = 0;
  const std::uint8_t* at = s.values + first * 9;
  for (unsigned r = 0; r < Rows; ++r, at += 9, out += stride) {
    const std::uint64_t row = big_endian(at);
    for (unsigned x = 0; x < 8; ++x) {
      const unsigned value = x < 7 ? (row >> (55 - 9 * x)) & 511 : ((row & 1) << 8) | at[8];
      seen |= value >= s.count;
      out[x] = s.table[value];
    }
  }
  return seen;
}

template <unsigned Rows>
inline std::uint64_t any_rows(const Subblock& s, unsigned first, std::uint64_t* out, std::int64_t stride) {
  switch (s.bits) {
    case 0: return uniform_rows<Rows>(s, out, stride);
    case 1: return rows<1, Rows>(s, first, out, stride);
    case 2: return rows<2, Rows>(s, first, out, stride);
    case 3: return rows<3, Rows>(s, first, out, stride);
    case 4: return rows<4, Rows>(s, first, out, stride);
    case 5: return rows<5, Rows>(s, first, out, stride);
    case 6: return rows<6, Rows>(s, first, out, stride);
    case 7: return rows<7, Rows>(s, first, out, stride);
    case 8: return rows<8, Rows>(s, first, out, stride);
    default: return nine_bit_rows<Rows>(s, first, out, stride);
  }
}

inline std::uint64_t portable_strip(const Subblock* subblocks, unsigned n, std::uint64_t* out, std::int64_t stride_z,
                                    std::int64_t stride_y) {
  std::uint64_t seen = 0;
  for (unsigned z = 0; z < 8; ++z, out += stride_z)
    for (unsigned k = 0; k < n; ++k) seen |= any_rows<8>(subblocks[k], 8 * z, out + 8 * k, stride_y);
  return seen;
}

#if ZARR_DVID_AVX512
#define ZARR_DVID_TARGET_AVX512 __attribute__((target("avx512f")))

// The 8 rows of a plane. Up to 6 bits the whole table is in registers, 8 labels in each. A permutation looks at an
// index's low bits alone, so what is left of the neighbouring values above them needs no masking.
template <unsigned Bits, bool Check>
ZARR_DVID_TARGET_AVX512 inline std::uint64_t avx512_plane(const Subblock& s, unsigned z, std::uint64_t* out,
                                                          std::int64_t stride) {
  constexpr unsigned kTables = Bits <= 3 ? 1 : Bits <= 6 ? 1u << (Bits - 3) : 1;
  __m512i table[kTables];
  for (unsigned t = 0; t < kTables; ++t) table[t] = _mm512_loadu_si512(s.table + 8 * t);
  const __m512i to_bottom = _mm512_set_epi64(64 - 8 * Bits, 64 - 7 * Bits, 64 - 6 * Bits, 64 - 5 * Bits, 64 - 4 * Bits,
                                             64 - 3 * Bits, 64 - 2 * Bits, 64 - Bits);
  const __m512i to_top = _mm512_set_epi64(7 * Bits, 6 * Bits, 5 * Bits, 4 * Bits, 3 * Bits, 2 * Bits, Bits, 0);
  __m512i largest = _mm512_setzero_si512();  // of the values so far, lane by lane; a value is a lane's top bits
  const std::uint8_t* at = s.values + z * 8 * Bits;
#pragma GCC unroll 8
  for (unsigned y = 0; y < 8; ++y, at += Bits, out += stride) {
    const __m512i row = _mm512_set1_epi64(static_cast<long long>(big_endian(at)));
    if constexpr (Check) largest = _mm512_max_epu64(largest, _mm512_sllv_epi64(row, to_top));
    const __m512i values = _mm512_srlv_epi64(row, to_bottom);
    __m512i labels;
    if constexpr (Bits <= 3) {
      labels = _mm512_permutexvar_epi64(values, table[0]);
    } else if constexpr (Bits == 4) {
      labels = _mm512_permutex2var_epi64(table[0], values, table[1]);
    } else if constexpr (Bits <= 6) {
      const __mmask8 bit4 = _mm512_test_epi64_mask(values, _mm512_set1_epi64(16));
      labels = _mm512_mask_blend_epi64(bit4, _mm512_permutex2var_epi64(table[0], values, table[1]),
                                       _mm512_permutex2var_epi64(table[2], values, table[3]));
      if constexpr (Bits == 6) {
        const __mmask8 bit5 = _mm512_test_epi64_mask(values, _mm512_set1_epi64(32));
        const __m512i upper = _mm512_mask_blend_epi64(bit4, _mm512_permutex2var_epi64(table[4], values, table[5]),
                                                      _mm512_permutex2var_epi64(table[6], values, table[7]));
        labels = _mm512_mask_blend_epi64(bit5, labels, upper);
      }
    } else {
      const __m512i index = _mm512_and_si512(values, _mm512_set1_epi64((1 << Bits) - 1));
      labels = _mm512_i64gather_epi64(index, s.table, 8);
    }
    _mm512_storeu_si512(out, labels);
  }
  if constexpr (!Check) return 0;
  return _mm512_cmpge_epu64_mask(largest, _mm512_set1_epi64(static_cast<long long>(std::uint64_t{s.count} << (64 - Bits))));
}

// A count of 2^Bits leaves no value that could be too large.
template <unsigned Bits>
ZARR_DVID_TARGET_AVX512 inline std::uint64_t avx512_plane(const Subblock& s, unsigned z, std::uint64_t* out,
                                                          std::int64_t stride) {
  return s.count == 1u << Bits ? avx512_plane<Bits, false>(s, z, out, stride) : avx512_plane<Bits, true>(s, z, out, stride);
}

ZARR_DVID_TARGET_AVX512 inline std::uint64_t avx512_uniform_plane(const Subblock& s, std::uint64_t* out,
                                                                  std::int64_t stride) {
  const __m512i label = _mm512_set1_epi64(static_cast<long long>(s.table[0]));
#pragma GCC unroll 8
  for (unsigned y = 0; y < 8; ++y) _mm512_storeu_si512(out + y * stride, label);
  return 0;
}

ZARR_DVID_TARGET_AVX512 inline std::uint64_t avx512_strip(const Subblock* subblocks, unsigned n, std::uint64_t* out,
                                                          std::int64_t stride_z, std::int64_t stride_y) {
  std::uint64_t seen = 0;
  for (unsigned z = 0; z < 8; ++z, out += stride_z)
    for (unsigned k = 0; k < n; ++k) {
      const Subblock& s = subblocks[k];
      std::uint64_t* to = out + 8 * k;
      switch (s.bits) {
        case 0: seen |= avx512_uniform_plane(s, to, stride_y); break;
        case 1: seen |= avx512_plane<1>(s, z, to, stride_y); break;
        case 2: seen |= avx512_plane<2>(s, z, to, stride_y); break;
        case 3: seen |= avx512_plane<3>(s, z, to, stride_y); break;
        case 4: seen |= avx512_plane<4>(s, z, to, stride_y); break;
        case 5: seen |= avx512_plane<5>(s, z, to, stride_y); break;
        case 6: seen |= avx512_plane<6>(s, z, to, stride_y); break;
        case 7: seen |= avx512_plane<7>(s, z, to, stride_y); break;
        case 8: seen |= avx512_plane<8>(s, z, to, stride_y); break;
        default: seen |= nine_bit_rows<8>(s, 8 * z, to, stride_y);
      }
    }
  return seen;
}
#endif

}  // namespace detail

// Decodes `n` whole sub-blocks side by side along x, plane by plane, so that neighbouring rows of the output meet in the
// cache; non-zero if a value was >= its count.
using StripKernel = std::uint64_t (*)(const Subblock*, unsigned n, std::uint64_t* out, std::int64_t stride_z,
                                      std::int64_t stride_y);

inline StripKernel strip_kernel() {
#if ZARR_DVID_AVX512
  static const bool has_avx512 = __builtin_cpu_supports("avx512f") != 0;
  if (has_avx512) return detail::avx512_strip;
#endif
  return detail::portable_strip;
}

// One row of a sub-block to 8 labels; non-zero if a value was >= its count.
inline std::uint64_t decode_row(const Subblock& s, unsigned row, std::uint64_t* out) {
  return detail::any_rows<1>(s, row, out, 0);
}

}  // namespace dvid
