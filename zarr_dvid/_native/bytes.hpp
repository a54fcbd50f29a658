// Bounds-checked views of foreign bytes, and the one exception that the parsers throw.
// Nothing in these headers knows of Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "zarr-dvid reads little-endian data in place and needs a little-endian machine"
#endif

namespace dvid {

// What is wrong with the bytes: which field, where it starts, what was expected there and what was found.
struct Fault : std::exception {
  const char* field;
  const char* rule;
  std::uint64_t offset;
  std::uint64_t expected;
  std::uint64_t found;

  Fault(const char* field_, const char* rule_, std::uint64_t offset_, std::uint64_t expected_, std::uint64_t found_)
      : field(field_), rule(rule_), offset(offset_), expected(expected_), found(found_) {}
  const char* what() const noexcept override { return rule; }
};

template <class T>
inline T load(const std::uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class T>
inline void store(void* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

// A read-only span. Every accessor checks its bounds in 64 bits before it touches a byte.
struct Bytes {
  const std::uint8_t* data = nullptr;
  std::uint64_t size = 0;

  bool holds(std::uint64_t offset, std::uint64_t count) const { return offset <= size && count <= size - offset; }

  void require(const char* field, std::uint64_t offset, std::uint64_t count) const {
    if (!holds(offset, count)) throw Fault(field, "would run past the end", offset, count, offset <= size ? size - offset : 0);
  }

  template <class T>
  T get(const char* field, std::uint64_t offset) const {
    require(field, offset, sizeof(T));
    return load<T>(data + offset);
  }

  Bytes part(const char* field, std::uint64_t offset, std::uint64_t count) const {
    require(field, offset, count);
    return Bytes{data + offset, count};
  }
};

}  // namespace dvid
