#include "common/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "ragged_attention/error.h"

namespace ragged_attention {
namespace {

constexpr int kMaxThreads = 1024;

int affinity_cpus() {
#if defined(__linux__)
  // The kernel refuses a mask smaller than its own, whose size it does not tell: grow until it fits.
  for (int cpus = 1024; cpus <= (1 << 20); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(cpus);
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int default_num_threads() {
  const char* text = std::getenv("RAGGED_ATTENTION_NUM_THREADS");
  if (text == nullptr || *text == '\0') return std::min(affinity_cpus(), kMaxThreads);
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < 1 || value > kMaxThreads) {
    throw ValueError("the environment variable RAGGED_ATTENTION_NUM_THREADS must be an integer from 1 to " +
                     std::to_string(kMaxThreads) + ", got '" + text + "'");
  }
  return static_cast<int>(value);
}

std::atomic<int> g_num_threads{0};  // 0: not asked for yet

// One parallel_for. Lives on the caller's stack; no worker touches it after its `running` mark is gone.
struct Job {
  detail::TaskFunction function;
  void* context;
  std::int64_t num_tasks;
  std::atomic<std::int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;

  // fetch_add cannot overflow: it passes num_tasks at most once per thread.
  void drain() noexcept {
    for (;;) {
      const std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks) return;
      try {
        function(context, task);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(num_tasks, std::memory_order_relaxed);
      }
    }
  }
};

// condition.wait(lock, ready), without its symbol: a program built with GCC 12 or later needs GLIBCXX_3.4.30 for it,
// which Red Hat 9 and older conda environments lack, so that there a wheel would not import. These are its insides.
template <typename Ready>
void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Ready ready) {
  while (!ready()) {
#if defined(__GLIBCXX__)
    pthread_cond_wait(condition.native_handle(), lock.mutex()->native_handle());
#else
    condition.wait(lock);
#endif
  }
}

thread_local bool t_inside_task = false;

// Workers sleep on a condition variable between jobs. A worker that wakes after its job is over finds `job_` null and
// sleeps again, so a job never waits for a worker that did not start on it.
class Pool {
 public:
  explicit Pool(int num_workers) {
    workers_.reserve(static_cast<std::size_t>(num_workers));
    for (int i = 0; i < num_workers; ++i) {
      try {
        workers_.emplace_back([this] { work(); });
      } catch (const std::system_error&) {
        break;  // the system has no more threads to give: those that started do the work
      }
    }
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      ++generation_;
    }
    const std::int64_t helpers = std::min<std::int64_t>(job.num_tasks - 1, static_cast<std::int64_t>(workers_.size()));
    if (helpers == static_cast<std::int64_t>(workers_.size())) {
      wake_.notify_all();
    } else {
      for (std::int64_t i = 0; i < helpers; ++i) wake_.notify_one();
    }
    job.drain();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    wait(done_, lock, [this] { return running_ == 0; });
  }

 private:
  void work() {
    t_inside_task = true;
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wait(wake_, lock, [&] { return stop_ || (job_ != nullptr && generation_ != seen); });
      if (stop_) return;
      seen = generation_;
      Job* const job = job_;
      ++running_;
      lock.unlock();
      job->drain();
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  std::uint64_t generation_ = 0;
  int running_ = 0;  // workers that have taken up the job and not finished
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

// The pool is never destroyed at exit: its sleeping workers end with the process, and static destruction cannot race
// with a caller that is still at work. `g_busy` guards both variables below and is only ever tried, never waited for.
std::atomic<bool> g_busy{false};
Pool* g_pool = nullptr;
int g_pool_threads = 0;  // the setting that g_pool was built for

#if defined(__unix__) || defined(__APPLE__)
// In a forked child the workers do not exist and the pool's mutex may be locked for ever: forget the pool (its memory
// with it) and start anew. Registered when the library is loaded, so there is no call that it comes too late for.
void forget_pool_in_child() {
  g_pool = nullptr;
  g_pool_threads = 0;
  g_busy.store(false, std::memory_order_release);
}
const int g_fork_handler = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
#endif

class BusyGuard {
 public:
  BusyGuard() : acquired_(!g_busy.exchange(true, std::memory_order_acquire)) {}
  ~BusyGuard() {
    if (acquired_) g_busy.store(false, std::memory_order_release);
  }
  BusyGuard(const BusyGuard&) = delete;
  BusyGuard& operator=(const BusyGuard&) = delete;
  bool acquired() const { return acquired_; }

 private:
  bool acquired_;
};

class InsideTask {
 public:
  InsideTask() : before_(t_inside_task) { t_inside_task = true; }
  ~InsideTask() { t_inside_task = before_; }
  InsideTask(const InsideTask&) = delete;
  InsideTask& operator=(const InsideTask&) = delete;

 private:
  bool before_;
};

}  // namespace

int num_threads() {
  int n = g_num_threads.load(std::memory_order_relaxed);
  if (n == 0) {
    const int initial = default_num_threads();
    // Another thread may have been first, or may have set a number meanwhile: that one stands.
    n = g_num_threads.compare_exchange_strong(n, initial) ? initial : n;
  }
  return n;
}

void set_num_threads(int n) {
  if (n < 1 || n > kMaxThreads) {
    throw ValueError("the number of threads must be from 1 to " + std::to_string(kMaxThreads) + ", got " +
                     std::to_string(n));
  }
  g_num_threads.store(n);
}

namespace detail {

void parallel_for(std::int64_t num_tasks, TaskFunction function, void* context) {
  if (num_tasks <= 0) return;
  const int threads = num_threads();
  if (num_tasks > 1 && threads > 1 && !t_inside_task) {
    const BusyGuard guard;
    if (guard.acquired()) {
      if (g_pool_threads != threads) {
        delete g_pool;
        g_pool = nullptr;
        g_pool_threads = 0;
        g_pool = new Pool(threads - 1);
        g_pool_threads = threads;
      }
      Job job{function, context, num_tasks, {}, {}, {}};
      {
        const InsideTask inside;
        g_pool->run(job);
      }
      if (job.error) std::rethrow_exception(job.error);
      return;
    }
  }
  const InsideTask inside;
  for (std::int64_t task = 0; task < num_tasks; ++task) function(context, task);
}

}  // namespace detail
}  // namespace ragged_attention
