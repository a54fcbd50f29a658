// Many records decoded in one go, into windows of a few arrays.
#pragma once

#include <vector>

#include "pool.hpp"
#include "record.hpp"

namespace dvid {

struct Job {
  RecordSource record;  // of no bytes: the window is filled with 0
  Window window;        // of the chunk
  Output out;           // where it goes
};

enum class Status : std::uint8_t { done = 0, refused = 1, compressed_body = 2, no_memory = 3 };

inline Status run_job(const Job& job, const Layout& layout, View view) noexcept {
  static thread_local FrameReader frames;
  try {
    if (job.record.bytes.data == nullptr) {
      detail::fill(0, job.window, job.out);
      return Status::done;
    }
    return decode_record(job.record, layout, view, frames, job.window, job.out) == Handled::yes ? Status::done
                                                                                              : Status::compressed_body;
  } catch (const Fault&) {
    return Status::refused;
  } catch (const std::exception&) {
    return Status::no_memory;
  }
}

// Decodes all jobs; the status of each.
inline std::vector<Status> run_jobs(const std::vector<Job>& jobs, const Layout& layout, View view, unsigned max_threads) {
  std::vector<Status> status(jobs.size());
  if (jobs.empty()) return status;
  Pool::of_process().run(jobs.size(), max_threads, [&](std::size_t i) { status[i] = run_job(jobs[i], layout, view); });
  return status;
}

}  // namespace dvid
