// The pool: every task once, whatever calls it, from where, and after a fork.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "ragged_attention/error.h"

#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#if defined(__SANITIZE_THREAD__)
#define RAGGED_ATTENTION_TEST_TSAN 1
#endif

namespace ragged_attention {
namespace {

struct RestoreThreads {
  int before = num_threads();
  ~RestoreThreads() { set_num_threads(before); }
};

bool every_task_once(std::int64_t num_tasks) {
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(num_tasks));
  parallel_for(num_tasks, [&](std::int64_t task) { runs[static_cast<std::size_t>(task)].fetch_add(1); });
  for (const std::atomic<int>& count : runs) {
    if (count.load() != 1) return false;
  }
  return true;
}

TEST_CASE("each task runs once, for every number of threads and tasks") {
  const RestoreThreads restore;
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    CHECK(num_threads() == threads);
    for (const std::int64_t tasks : {0, 1, 2, 3, 7, 8, 9, 1000}) CHECK(every_task_once(tasks));
  }
  parallel_for(-5, [](std::int64_t) { FAIL("there is no task"); });
}

TEST_CASE("more than one thread works, the calling one among them") {
  const RestoreThreads restore;
  set_num_threads(4);
  std::atomic<int> waiting{0};
  std::atomic<bool> caller{false};
  const std::thread::id self = std::this_thread::get_id();
  // Each task waits for the others: four threads must be there at once.
  parallel_for(4, [&](std::int64_t) {
    waiting.fetch_add(1);
    while (waiting.load() < 4) std::this_thread::yield();
    if (std::this_thread::get_id() == self) caller = true;
  });
  CHECK(caller.load());
}

TEST_CASE("nested loops run, serially") {
  const RestoreThreads restore;
  set_num_threads(4);
  std::atomic<std::int64_t> sum{0};
  std::atomic<bool> moved{false};
  parallel_for(8, [&](std::int64_t outer) {
    const std::thread::id self = std::this_thread::get_id();
    parallel_for(8, [&](std::int64_t inner) {
      sum.fetch_add(outer * 8 + inner);
      if (std::this_thread::get_id() != self) moved = true;
    });
  });
  CHECK(sum.load() == 64 * 63 / 2);
  CHECK(!moved.load());
}

TEST_CASE("calls from several threads at once, while the number of threads changes") {
  const RestoreThreads restore;
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int round = 0; round < 200; ++round) {
        if (c == 0 && round % 20 == 0) set_num_threads(1 + round / 20 % 4);
        if (!every_task_once(17 + round % 5)) failures.fetch_add(1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(failures.load() == 0);
}

TEST_CASE("an exception reaches the caller and the pool lives on") {
  const RestoreThreads restore;
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    for (int round = 0; round < 20; ++round) {
      std::string text;
      try {
        parallel_for(100, [&](std::int64_t task) {
          if (task % 10 == 3) throw std::runtime_error("task failed");
        });
      } catch (const std::runtime_error& error) {
        text = error.what();
      }
      CHECK(text == "task failed");
      CHECK(every_task_once(50));
    }
  }
}

TEST_CASE("the number of threads is checked") {
  CHECK_THROWS_AS(set_num_threads(0), ValueError);
  CHECK_THROWS_AS(set_num_threads(-1), ValueError);
  CHECK_THROWS_AS(set_num_threads(1025), ValueError);
  CHECK(num_threads() >= 1);
}

// ThreadSanitizer does not support threads started after a fork of a process that has threads.
#if (defined(__unix__) || defined(__APPLE__)) && !defined(RAGGED_ATTENTION_TEST_TSAN)
// Exit status of `work` in a child; -1 if it did not end within ten seconds.
template <typename Function>
int in_child(const Function& work) {
  const pid_t child = fork();
  if (child == 0) _exit(work() ? 0 : 1);
  for (int i = 0; i < 1000; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -2;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

bool two_threads_meet() {
  std::atomic<int> waiting{0};
  parallel_for(2, [&](std::int64_t) {
    waiting.fetch_add(1);
    while (waiting.load() < 2) std::this_thread::yield();
  });
  return true;
}

TEST_CASE("a forked child has a pool of its own") {
  const RestoreThreads restore;
  set_num_threads(3);
  CHECK(every_task_once(100));
  CHECK(in_child([] { return every_task_once(100) && two_threads_meet(); }) == 0);
  CHECK(in_child([] { return in_child([] { return every_task_once(100) && two_threads_meet(); }) == 0; }) == 0);
  CHECK(every_task_once(100));
}

TEST_CASE("a child forked while another thread computes does not hang") {
  const RestoreThreads restore;
  set_num_threads(3);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) parallel_for(50, [](std::int64_t) { std::this_thread::yield(); });
  });
  for (int round = 0; round < 20; ++round) {
    CHECK(in_child([] { return every_task_once(100) && two_threads_meet(); }) == 0);
  }
  stop = true;
  other.join();
}
#endif

TEST_CASE("the instruction set can be lowered and has a name") {
  const CpuIsa before = cpu_isa();
  CHECK(cpu_isa_supported(before));
  CHECK(cpu_isa_supported(CpuIsa::kBaseline));
  set_cpu_isa(CpuIsa::kBaseline);
  CHECK(cpu_isa() == CpuIsa::kBaseline);
  CHECK(std::string(cpu_isa_name()) == cpu_isa_name(CpuIsa::kBaseline));
  for (const CpuIsa isa : {CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (!cpu_isa_supported(isa)) CHECK_THROWS_AS(set_cpu_isa(isa), ValueError);
  }
  set_cpu_isa(before);
}

}  // namespace
}  // namespace ragged_attention
