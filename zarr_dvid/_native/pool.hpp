// Threads for batches of jobs. They are made when a process first needs them, and never waited for at a fork or at its end.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace dvid {

// At most `limit` threads work at the same time, over all batches of the process: a caller works itself once it is let
// in, and helpers join it where there is room.
class Pool {
  std::mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable room_;
  std::deque<std::function<void()>> tasks_;
  unsigned n_threads_ = 0;
  unsigned n_working_ = 0;
  // Callers are let in as they came, and helpers stay away while one waits: else those who want few threads at a time would
  // never be let in among those who want many.
  std::uint64_t n_came_ = 0;
  std::uint64_t n_let_in_ = 0;

  // Every worker begins with a part of the jobs of its own, and then goes on with what is left of the others': neighbouring
  // jobs tend to share pages of memory, which should not be touched for the first time by two threads at once.
  struct Batch {
    const std::function<void(std::size_t)>* job;
    std::size_t n_jobs;
    std::vector<std::atomic<std::size_t>> next;  // of each part
    std::atomic<std::size_t> n_entered{0};
    unsigned n_helpers = 0;  // guarded by the pool's mutex, as is `closed`
    bool closed = false;
    std::condition_variable left;

    Batch(const std::function<void(std::size_t)>& job_, std::size_t n_jobs_, std::size_t n_parts)
        : job(&job_), n_jobs(n_jobs_), next(n_parts) {
      for (std::size_t part = 0; part < n_parts; ++part) next[part] = begin(part);
    }

    std::size_t begin(std::size_t part) const { return part * n_jobs / next.size(); }

    void work() {
      const std::size_t own = n_entered.fetch_add(1);
      for (std::size_t k = 0; k < next.size(); ++k) {
        const std::size_t part = (own + k) % next.size();
        for (std::size_t i; (i = next[part].fetch_add(1)) < begin(part + 1);) (*job)(i);
      }
    }
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      posted_.wait(lock, [&] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  void help(const std::shared_ptr<Batch>& batch, unsigned limit) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (batch->closed || n_working_ >= limit || n_let_in_ != n_came_) return;
      ++batch->n_helpers;
      ++n_working_;
    }
    batch->work();
    const std::lock_guard<std::mutex> lock(mutex_);
    --n_working_;
    room_.notify_all();
    if (--batch->n_helpers == 0) batch->left.notify_one();
  }

  // Threads or memory that can't be had are done without: the caller does all that nobody else does.
  void ask_for_help(const std::shared_ptr<Batch>& batch, std::size_t n_helpers, unsigned limit) noexcept {
    try {
      for (; n_threads_ < n_helpers; ++n_threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {
    }
    try {
      for (std::size_t i = 0; i < n_helpers; ++i) {
        tasks_.emplace_back([this, batch, limit] { help(batch, limit); });
        posted_.notify_one();
      }
    } catch (const std::exception&) {
    }
  }

 public:
  // Runs job(0), …, job(n_jobs - 1), which must not throw, in any order; returns when all are done. `n_jobs` and `limit`
  // are at least 1.
  void run(std::size_t n_jobs, unsigned limit, const std::function<void(std::size_t)>& job) {
    const auto batch = std::make_shared<Batch>(job, n_jobs, std::min<std::size_t>(limit, n_jobs));
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const std::uint64_t number = n_came_++;
      room_.wait(lock, [&] { return n_let_in_ == number && n_working_ < limit; });
      ++n_let_in_;
      ++n_working_;
      room_.notify_all();
      ask_for_help(batch, batch->next.size() - 1, limit);
    }
    batch->work();
    std::unique_lock<std::mutex> lock(mutex_);
    batch->closed = true;
    batch->left.wait(lock, [&] { return batch->n_helpers == 0; });
    --n_working_;
    room_.notify_all();
  }

  // This process's. A child of a fork gets a new one: it has neither the threads nor a say in the locks of the old one,
  // which is left as it is.
  static Pool& of_process() {
    static std::once_flag once;
    std::call_once(once, [] {
      current() = new Pool;
      pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
    });
    return *current();
  }

 private:
  static Pool*& current() {
    static Pool* pool = nullptr;
    return pool;
  }
};

}  // namespace dvid
