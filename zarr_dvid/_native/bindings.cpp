// The Python face of the native core. Everything here copies small things or hands on spans; the work is in the headers.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <deque>
#include <optional>
#include <tuple>

#include "arrow.hpp"
#include "batch.hpp"
#include "decode.hpp"
#include "encode.hpp"

namespace nb = nanobind;
using dvid::Bytes;

namespace {

// While one lives, this thread does not hold Python's lock.
//
// When Python ends, a daemon thread that wants the lock back is ended by pthread_exit (before Python 3.14), which unwinds
// the stack; frames of C++ above would take that for an exception and end the process with an abort. Such a thread waits
// here for the end instead.
class Unlocked {
  struct WaitForTheEnd {
    bool is_ending = true;
    ~WaitForTheEnd() {
      while (is_ending) pause();
    }
  };
  PyThreadState* const thread_ = PyEval_SaveThread();

 public:
  Unlocked() = default;
  ~Unlocked() noexcept(false) {  // a function that can't throw would not be unwound, but end the process
    WaitForTheEnd guard;
    PyEval_RestoreThread(thread_);
    guard.is_ending = false;
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
};

// A buffer of Python's, held while native code looks at it.
class Held {
  Py_buffer view_;

 public:
  Held(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Held() { PyBuffer_Release(&view_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  const Py_buffer& view() const { return view_; }
  Bytes bytes() const { return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::uint64_t>(view_.len)}; }
};

std::int64_t stride(const Py_buffer& view, int axis) { return view.strides[axis] / 8; }

void require_voxels(const Py_buffer& view) {
  if (view.ndim != 3 || view.itemsize != 8 || (view.shape[2] > 1 && view.strides[2] != 8) || view.strides[0] % 8 != 0 ||
      view.strides[1] % 8 != 0)
    throw nb::value_error("voxels must be a 3-D uint64 array, contiguous along x");
}

using Grid = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

// Decodes the window that starts at voxel `start_zyx` and is as large as `out`.
void decode_block(nb::handle block, nb::handle labels, std::tuple<std::uint32_t, std::uint32_t, std::uint32_t> start_zyx,
                  nb::handle out) {
  const Held held(block, PyBUF_SIMPLE);
  const Held target(out, PyBUF_STRIDED | PyBUF_WRITABLE);
  const Py_buffer& view = target.view();
  require_voxels(view);
  std::optional<Held> stand_in;
  if (!labels.is_none()) stand_in.emplace(labels, PyBUF_SIMPLE);
  const Unlocked unlocked;
  const dvid::Block parsed = dvid::parse_block(held.bytes());
  const std::uint8_t* table = parsed.labels;
  if (stand_in) {
    const Bytes given = stand_in->bytes();
    if (given.size != 8 * std::uint64_t{parsed.n_labels})
      throw dvid::Fault("labels", "must be as many as the block's own label table has", 16, parsed.n_labels, given.size / 8);
    table = given.data;
  }
  const auto [z, y, x] = start_zyx;
  const std::uint64_t start[3] = {z, y, x};
  const char* const axis[3] = {"window z", "window y", "window x"};
  for (int d = 0; d < 3; ++d) {
    const std::uint64_t size = 8 * std::uint64_t{parsed.grid[2 - d]};
    if (start[d] + static_cast<std::uint64_t>(view.shape[d]) > size)
      throw dvid::Fault(axis[d], "must end inside the block", 0, size, start[d] + static_cast<std::uint64_t>(view.shape[d]));
  }
  const auto size = [&](int d) { return static_cast<std::uint32_t>(view.shape[d]); };
  dvid::decode_block(parsed, table, {z, z + size(0), y, y + size(1), x, x + size(2)},
                     {static_cast<std::uint64_t*>(view.buf), stride(view, 0), stride(view, 1)});
}

std::tuple<Grid, std::uint32_t, std::uint64_t, bool> inspect_block(nb::handle block) {
  const Held held(block, PyBUF_SIMPLE);
  const dvid::Block parsed = dvid::parse_block(held.bytes());
  return {Grid{parsed.grid[2], parsed.grid[1], parsed.grid[0]}, parsed.n_labels, parsed.n_indices, parsed.solid()};
}

std::uint64_t frame_nbytes(nb::handle frame) {
  const Held held(frame, PyBUF_SIMPLE);
  return dvid::frame_bytes(held.bytes());
}

// Columns of a table of jobs, one row of int64 for each.
enum JobColumn { kSource, kOffset, kSize, kX, kY, kZ, kWindowZ, kWindowY, kWindowX, kSizeZ, kSizeY, kSizeX, kTarget, kToZ, kToY, kToX, kJobColumns };

// A number of a job, which must be from 0 to `most`.
std::uint64_t job_number(const std::int64_t* job, int column, std::int64_t most) {
  if (job[column] < 0 || job[column] > most) throw nb::value_error("a job must lie inside its source, its chunk and its target");
  return static_cast<std::uint64_t>(job[column]);
}

dvid::Job make_job(const std::int64_t* job, const std::deque<Held>& sources, const std::deque<Held>& targets) {
  dvid::Job made{};
  if (job[kSource] >= 0) {
    const Bytes source = sources[job_number(job, kSource, static_cast<std::int64_t>(sources.size()) - 1)].bytes();
    const std::int64_t size = static_cast<std::int64_t>(source.size);
    const std::uint64_t offset = job_number(job, kOffset, size);
    made.record.bytes = {source.data + offset, job_number(job, kSize, size - static_cast<std::int64_t>(offset))};
    for (int d = 0; d < 3; ++d) made.record.xyz[d] = static_cast<std::int32_t>(job_number(job, kX + d, INT32_MAX));
  }
  const Py_buffer& target = targets[job_number(job, kTarget, static_cast<std::int64_t>(targets.size()) - 1)].view();
  constexpr std::int64_t side = 8 * dvid::kChunkGrid;
  std::uint32_t from[3], until[3];
  std::int64_t to[3];
  for (int d = 0; d < 3; ++d) {
    from[d] = static_cast<std::uint32_t>(job_number(job, kWindowZ + d, side));
    until[d] = from[d] + static_cast<std::uint32_t>(job_number(job, kSizeZ + d, side - from[d]));
    to[d] = static_cast<std::int64_t>(job_number(job, kToZ + d, target.shape[d] - job[kSizeZ + d]));
  }
  made.window = {from[0], until[0], from[1], until[1], from[2], until[2]};
  made.out = {static_cast<std::uint64_t*>(target.buf) + to[0] * stride(target, 0) + to[1] * stride(target, 1) + to[2],
              stride(target, 0), stride(target, 1)};
  return made;
}

// Decodes records of `sources` into windows of `targets`; `jobs` has a row of int64 for each, of the columns above (source
// -1: fill with 0). Gives a status for each.
nb::bytes decode_batch(const std::vector<nb::object>& sources, nb::handle jobs, const std::vector<nb::object>& targets,
                       const dvid::Layout& layout, bool as_labels, unsigned max_threads) {
  const Held table(jobs, PyBUF_C_CONTIGUOUS);
  const Py_buffer& rows = table.view();
  if (rows.ndim != 2 || rows.itemsize != 8 || rows.shape[1] != kJobColumns) throw nb::value_error("jobs must be int64 of shape (n, 16)");
  if (max_threads == 0) throw nb::value_error("there must be one thread or more");
  std::deque<Held> from, to;
  for (const nb::object& source : sources) from.emplace_back(source, PyBUF_SIMPLE);
  for (const nb::object& target : targets) require_voxels(to.emplace_back(target, PyBUF_STRIDED | PyBUF_WRITABLE).view());
  std::vector<dvid::Job> made;
  for (Py_ssize_t i = 0; i < rows.shape[0]; ++i)
    made.push_back(make_job(static_cast<const std::int64_t*>(rows.buf) + i * kJobColumns, from, to));
  std::vector<dvid::Status> status;
  {
    const Unlocked unlocked;
    status = dvid::run_jobs(made, layout, as_labels ? dvid::View::labels : dvid::View::supervoxels, max_threads);
  }
  return nb::bytes(reinterpret_cast<const char*>(status.data()), status.size());
}

nb::bytes encode_block(nb::handle volume) {
  const Held held(volume, PyBUF_STRIDED_RO);
  const Py_buffer& view = held.view();
  require_voxels(view);
  for (int d = 0; d < 3; ++d)
    if (view.shape[d] == 0 || view.shape[d] % 8 != 0 || view.shape[d] > 8 * static_cast<Py_ssize_t>(dvid::kMaxGrid))
      throw nb::value_error("each side of a block must be a multiple of 8 voxels, from 8 to 1024");
  const auto grid = [&](int d) { return static_cast<std::uint32_t>(view.shape[d] / 8); };
  std::vector<std::uint8_t> block;
  {
    const Unlocked unlocked;
    block = dvid::encode_block({static_cast<const std::uint64_t*>(view.buf), stride(view, 0), stride(view, 1),
                                {grid(2), grid(1), grid(0)}});
  }
  return nb::bytes(block.data(), block.size());
}

dvid::Message parse_message(nb::handle metadata) {
  const Held held(metadata, PyBUF_SIMPLE);
  return dvid::parse_message(held.bytes());
}

std::vector<dvid::Field> parse_schema(nb::handle metadata) {
  const Held held(metadata, PyBUF_SIMPLE);
  return dvid::parse_schema(held.bytes());
}

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

using Range = std::pair<std::uint64_t, std::uint64_t>;
Range range(const dvid::Extent& extent) { return {extent.offset_bytes, extent.size_bytes}; }

std::tuple<std::tuple<int, int, int>, Range, Range, Range, std::int64_t> parse_row(const dvid::Message& message,
                                                                                   nb::handle body,
                                                                                   const dvid::Layout& layout,
                                                                                   std::uint64_t row) {
  const Held held(body, PyBUF_SIMPLE);
  const dvid::Row r = dvid::parse_row(message, held.bytes(), layout, row);
  return {{r.x, r.y, r.z}, range(r.labels), range(r.supervoxels), range(r.block), r.uncompressed_size};
}

// The same batch over a body in which each buffer has been decompressed.
dvid::Message with_buffers(const dvid::Message& message, std::uint64_t body_bytes, const std::vector<Range>& buffers) {
  if (buffers.size() != message.buffers.size()) throw nb::value_error("a batch keeps its number of buffers");
  dvid::Message plain = message;
  plain.codec = dvid::BodyCodec::none;
  plain.body_bytes = body_bytes;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].first > body_bytes || buffers[i].second > body_bytes - buffers[i].first)
      throw nb::value_error("a buffer must lie inside the body");
    plain.buffers[i] = {buffers[i].first, buffers[i].second};
  }
  return plain;
}

using ColumnPlace = std::tuple<std::int32_t, std::int32_t, bool>;  // node, first buffer, large; node -1 = absent

dvid::Column column(const ColumnPlace& place, std::uint64_t n_nodes, std::uint64_t n_buffers, int nodes, int buffers) {
  const auto [node, buffer, large] = place;
  if (node < 0 || buffer < 0 || static_cast<std::uint64_t>(node) + nodes > n_nodes ||
      static_cast<std::uint64_t>(buffer) + buffers > n_buffers)
    throw nb::value_error("a column must lie inside the layout");
  return {node, buffer, large};
}

dvid::Layout make_layout(std::uint64_t n_nodes, std::uint64_t n_buffers, const std::vector<ColumnPlace>& places) {
  if (places.size() != 7) throw nb::value_error("a layout has seven columns");
  const auto at = [&](std::size_t i, int nodes, int buffers) { return column(places[i], n_nodes, n_buffers, nodes, buffers); };
  dvid::Layout layout;
  layout.n_nodes = n_nodes;
  layout.n_buffers = n_buffers;
  layout.x = at(0, 1, 2);
  layout.y = at(1, 1, 2);
  layout.z = at(2, 1, 2);
  layout.labels = at(3, 2, 4);
  layout.supervoxels = at(4, 2, 4);
  layout.block = at(5, 1, 3);
  if (std::get<0>(places[6]) >= 0) layout.uncompressed_size = at(6, 1, 2);
  return layout;
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // of what daemon threads still use when Python ends
  m.doc() = "The native core of zarr-dvid: DVID blocks and Arrow messages, every bound checked.";

  static PyObject* fault = PyErr_NewException("zarr_dvid._core.Fault", PyExc_ValueError, nullptr);
  m.attr("Fault") = nb::borrow(fault);
  nb::register_exception_translator(
      [](const std::exception_ptr& caught, void*) {
        try {
          std::rethrow_exception(caught);
        } catch (const dvid::Fault& f) {
          const nb::tuple what = nb::make_tuple(f.field, f.rule, f.offset, f.expected, f.found);
          PyErr_SetObject(fault, what.ptr());
        }
      },
      nullptr);

  m.def("decode_block", &decode_block, nb::arg("block"), nb::arg("labels").none(), nb::arg("start_zyx"), nb::arg("out"));
  m.def("inspect_block", &inspect_block, nb::arg("block"));
  m.def("frame_nbytes", &frame_nbytes, nb::arg("frame"));
  m.def("encode_block", &encode_block, nb::arg("volume"));

  nb::class_<dvid::Layout>(m, "Layout")
      .def_ro("n_nodes", &dvid::Layout::n_nodes)
      .def_ro("n_buffers", &dvid::Layout::n_buffers);
  m.def("decode_batch", &decode_batch, nb::arg("sources"), nb::arg("jobs"), nb::arg("targets"), nb::arg("layout"),
        nb::arg("as_labels"), nb::arg("max_threads"));
  dvid::Pool::of_process();  // now, so that every later fork is seen
  m.def("make_layout", &make_layout, nb::arg("n_nodes"), nb::arg("n_buffers"), nb::arg("columns"));

  nb::class_<dvid::Message>(m, "Message")
      .def_prop_ro("kind", [](const dvid::Message& self) { return static_cast<int>(self.kind); })
      .def_prop_ro("codec", [](const dvid::Message& self) { return static_cast<int>(self.codec); })
      .def_ro("body_bytes", &dvid::Message::body_bytes)
      .def_ro("n_rows", &dvid::Message::n_rows)
      .def_prop_ro("buffers", [](const dvid::Message& self) {
        std::vector<Range> ranges;
        for (const dvid::Extent& extent : self.buffers) ranges.push_back(range(extent));
        return ranges;
      })
      .def("coordinate_buffers", [](const dvid::Message& self, const dvid::Layout& layout) {
        std::vector<Range> ranges;
        for (const dvid::Extent& extent : dvid::coordinate_buffers(self, layout)) ranges.push_back(range(extent));
        return ranges;
      }, nb::arg("layout"))
      .def("with_buffers", &with_buffers, nb::arg("body_bytes"), nb::arg("buffers"))
      .def("row", &parse_row, nb::arg("body"), nb::arg("layout"), nb::arg("row"));

  nb::class_<dvid::Field>(m, "Field")
      .def_prop_ro("name", [](const dvid::Field& self) { return to_bytes(self.name); })
      .def_ro("type", &dvid::Field::type)
      .def_ro("bit_width", &dvid::Field::bit_width)
      .def_ro("is_signed", &dvid::Field::is_signed)
      .def_ro("has_dictionary", &dvid::Field::has_dictionary)
      .def_ro("children", &dvid::Field::children)
      .def_prop_ro("metadata", [](const dvid::Field& self) {
        std::vector<std::pair<nb::bytes, nb::bytes>> pairs;
        for (const auto& [key, value] : self.metadata) pairs.emplace_back(to_bytes(key), to_bytes(value));
        return pairs;
      });
  m.def("parse_message", &parse_message, nb::arg("metadata"));
  m.def("parse_schema", &parse_schema, nb::arg("metadata"));
}
