// The CPU backend's threads: a pool of std::thread that survives fork.
//
// Not OpenMP: a child forked after a parallel region of libgomp hangs in its next one. Here a child starts with no pool
// and builds its own at its first call.
#pragma once

#include <cstdint>

namespace ragged_attention {

// Threads that a call uses, the calling one included. At first use: the environment variable
// RAGGED_ATTENTION_NUM_THREADS (1 to 1024; a ValueError if it is anything else), or, where that is unset or empty, the
// number of CPUs in the calling thread's affinity mask. No result depends on it.
int num_threads();

// Takes effect at the next call. ValueError unless 1 <= n <= 1024.
void set_num_threads(int n);

namespace detail {
using TaskFunction = void (*)(void* context, std::int64_t task);
void parallel_for(std::int64_t num_tasks, TaskFunction function, void* context);
}  // namespace detail

// Calls function(task) once for each task in [0, num_tasks), on the pool and on the calling thread, and returns when
// all are done. Tasks are handed out in ascending order as threads become free; each must own what it writes. While the
// pool is busy with another caller's tasks, and inside a task, the loop runs on the calling thread alone. The first
// exception of a task is rethrown here; tasks not yet started are then dropped.
template <typename Function>
void parallel_for(std::int64_t num_tasks, const Function& function) {
  detail::parallel_for(
      num_tasks, [](void* context, std::int64_t task) { (*static_cast<const Function*>(context))(task); },
      const_cast<Function*>(&function));
}

}  // namespace ragged_attention
