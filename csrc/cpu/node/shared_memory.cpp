#include "cpu/node/shared_memory.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>

#include "cpu/elements.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"
#include "cpu/reduction/reduce.hpp"
#include "cpu/stream.hpp"

namespace topkube {
namespace {

constexpr std::size_t line = 128;     // two lines: the prefetcher of many CPUs fetches pairs
constexpr std::size_t block = 2048;   // elements summed at once, in the first-level cache
constexpr std::size_t few_ranks = 3;  // with at most this many, every rank computes the whole sum: one exchange, not two

// Returns the time of the monotonic clock in seconds.
double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Slows a waiting loop down, so that it takes less from the other thread of the processor core.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void copy_out(void* out, const void* input, std::size_t bytes, bool stream) {
  if (stream)
    stream_copy(out, input, bytes);
  else
    copy(out, input, bytes);
}

}  // namespace

NodeTimeout::NodeTimeout(std::vector<int> ranks)
    : std::runtime_error("a rank of this node did not arrive"), missing(std::move(ranks)) {}
NodeMismatch::NodeMismatch(std::vector<int> ranks)
    : std::runtime_error("ranks of this node entered different collectives"), different(std::move(ranks)) {}

// Counters only grow, over the life of the world, so they are never reset. A rank can be at most one call ahead of another rank,
// so two signatures per rank are enough.
struct SharedMemory::Slot {
  alignas(line) std::atomic<std::uint64_t> entered;
  std::atomic<std::uint64_t> signature[2];
  alignas(line) std::atomic<std::uint64_t> published;
  alignas(line) std::atomic<std::uint64_t> taken;
  alignas(line) std::atomic<std::uint32_t> asleep;  // 1 if the rank sleeps, or is about to sleep, until `woken` changes
  std::atomic<std::uint32_t> woken;
};

std::size_t SharedMemory::window_bytes(int ranks, int cells) {
  return static_cast<std::size_t>(ranks) * (sizeof(Slot) + static_cast<std::size_t>(cells) * cell_bytes) + line;
}

SharedMemory::SharedMemory(void* base, int rank, int ranks, int shards, int cells, bool crowded)
    : rank_(rank), ranks_(ranks), shards_(shards), cells_(cells), crowded_(crowded) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  base_ = reinterpret_cast<char*>((address + line - 1) / line * line);
}

SharedMemory::Slot& SharedMemory::slot(int rank) const { return reinterpret_cast<Slot*>(base_)[rank]; }

char* SharedMemory::cell(int rank, std::uint64_t step) const {
  const std::size_t number = static_cast<std::size_t>(rank) * cells_ + step % cells_;
  return base_ + sizeof(Slot) * ranks_ + number * cell_bytes;
}

// Wakes the ranks that sleep. This rank changes its counters before it checks for sleepers, and a sleeper sets `asleep` before it
// checks the counters for the last time. So at least one of the two sees the change of the other.
void SharedMemory::wake_sleepers() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < ranks_; ++peer) {
    Slot& other = slot(peer);
    if (peer == rank_ || other.asleep.load(std::memory_order_relaxed) == 0) continue;
    other.woken.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &other.woken, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

// Spins for about the time of one chunk and then sleeps until another rank wakes this rank. There may be more ranks than
// processors, and a waiting rank must not take a processor from a rank that it waits for.
template <class Ready>
void SharedMemory::wait(Ready ready) {
  for (int i = 0; i < (crowded_ ? 20 : 400); ++i) {
    if (ready()) return;
    relax();
  }
  for (int i = 0; i < (crowded_ ? 2 : 50); ++i) {
    sched_yield();
    if (ready()) return;
  }
  Slot& mine = slot(rank_);
  double polled = now();
  for (;;) {
    const std::uint32_t seen = mine.woken.load(std::memory_order_acquire);
    mine.asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool done = ready();
    if (!done) {
      const timespec longest{0, 50'000'000};  // 50 ms, so that `poll` and the deadline are checked
      syscall(SYS_futex, &mine.woken, FUTEX_WAIT, seen, &longest, nullptr, 0);
    }
    mine.asleep.store(0, std::memory_order_relaxed);
    if (done || ready()) return;
    const double time = now();
    if (time - polled > 0.1) {  // seconds
      polled = time;
      has_failed_ = true;  // for the case that `poll` throws
      if (poll) poll();
      has_failed_ = false;
    }
    if (time > ends_) {
      has_failed_ = true;
      for (int peer = 0; peer < ranks_; ++peer)
        if (slot(peer).entered.load(std::memory_order_acquire) < calls_) missing_.push_back(peer);
      throw NodeTimeout(missing_);
    }
  }
}

// Announces that this rank has entered the call, and returns when all ranks have. `publish_first` runs before that: the other ranks
// then find its cells when they see this rank enter, so a short pipeline waits once and not twice.
template <class PublishFirst>
void SharedMemory::enter(Call call, PublishFirst publish_first) {
  // After a wait that failed, the other ranks may have taken what this rank had published: their steps and its own do not match.
  if (has_failed_) throw NodeTimeout(missing_);
  ends_ = now() + call.deadline_seconds;
  ++calls_;
  Slot& mine = slot(rank_);
  mine.signature[calls_ % 2].store(call.signature, std::memory_order_relaxed);
  publish_first();
  mine.entered.store(calls_, std::memory_order_release);
  wake_sleepers();
  int arrived = 0;
  wait([&] {
    while (arrived < ranks_ && slot(arrived).entered.load(std::memory_order_acquire) >= calls_) ++arrived;
    return arrived == ranks_;
  });
  std::vector<int> different;
  for (int peer = 0; peer < ranks_; ++peer)
    if (slot(peer).signature[calls_ % 2].load(std::memory_order_relaxed) != call.signature) different.push_back(peer);
  if (!different.empty()) throw NodeMismatch(different);
}

// Returns true if the counter of every other rank is at least `steps`. `seen` is the least counter that this rank has read so far.
bool SharedMemory::have_all_reached(std::uint64_t steps, std::atomic<std::uint64_t> Slot::* counter, std::uint64_t& seen) const {
  if (seen >= steps) return true;
  std::uint64_t least = ~std::uint64_t{0};
  for (int peer = 0; peer < ranks_; ++peer)
    if (peer != rank_) least = std::min(least, (slot(peer).*counter).load(std::memory_order_acquire));
  seen = least;
  return least >= steps;
}

bool SharedMemory::have_all_published(std::uint64_t steps) { return have_all_reached(steps, &Slot::published, published_); }

bool SharedMemory::have_all_taken(std::uint64_t steps) { return have_all_reached(steps, &Slot::taken, taken_); }

bool SharedMemory::has_room(std::uint64_t step) {
  const std::uint64_t cells = static_cast<std::uint64_t>(cells_);
  return sequence_ + step < cells || have_all_taken(sequence_ + step + 1 - cells);
}

// Calls publish(step) and take(step) for all steps. This rank publishes one or two steps ahead of the step that it takes, so that
// no rank waits for the copy of another rank. If the other ranks are late, this rank publishes further ahead, as far as there are
// free cells. With `call`, all ranks enter it first.
template <class Publish, class Take>
void SharedMemory::run_pipeline(std::uint64_t steps, Publish publish, Take take, const Call* call) {
  constexpr std::uint64_t ahead = 2;
  Slot& mine = slot(rank_);
  std::uint64_t published = 0, taken = 0;
  const auto publish_next = [&] {
    publish(published);
    mine.published.store(sequence_ + ++published, std::memory_order_release);
  };
  // If the ranks entered different calls, the steps that are published here do not count: the next call publishes its own in their
  // place, before the other ranks read how many there are.
  if (call != nullptr)
    enter(*call, [&] {
      while (ranks_ > 1 && published < std::min(steps, ahead) && has_room(published)) publish_next();
    });
  if (ranks_ == 1) {
    for (std::uint64_t i = 0; i < steps; ++i) take(i);
    return;
  }
  while (taken < steps) {
    const bool must_publish = published < steps && published < taken + ahead && has_room(published);
    if (!must_publish && have_all_published(sequence_ + taken + 1)) {
      take(taken);
      mine.taken.store(sequence_ + ++taken, std::memory_order_release);
      wake_sleepers();
    } else if (published < steps && has_room(published)) {
      publish_next();
      wake_sleepers();
    } else {
      wait([&] { return have_all_published(sequence_ + taken + 1) || (published < steps && has_room(published)); });
    }
  }
  sequence_ += steps;
}

bool SharedMemory::all_reduce(void* data, Dtype dtype, std::size_t length, float scale, Call call) {
  const IeeeScope ieee;
  char* x = static_cast<char*>(data);
  const bool are_few = static_cast<std::size_t>(ranks_) <= few_ranks;
  return are_few ? sum_on_every_rank(x, dtype, length, scale, call) : reduce_and_gather(x, dtype, length, scale, call);
}

// Reduce-scatter and all-gather, in pieces that stay in the second-level cache between the two.
bool SharedMemory::reduce_and_gather(char* x, Dtype dtype, std::size_t length, float scale, Call call) {
  const std::size_t item = item_size(dtype), piece = 4 * cell_bytes / item * ranks_;
  bool finite = true;
  std::size_t start = 0;
  do {
    const std::size_t size = std::min(piece, length - start);
    finite &= reduce_steps(x + start * item, dtype, size, scale, nullptr, nullptr, start == 0 ? &call : nullptr);
    gather_steps(x + start * item, item, size, nullptr, false, nullptr);
    start += size;
  } while (start < length);
  return finite;
}

// Every rank computes the whole sum from the arrays of all ranks.
bool SharedMemory::sum_on_every_rank(char* x, Dtype dtype, std::size_t length, float scale, Call call) {
  const std::size_t item = item_size(dtype), chunk = cell_bytes / item;
  const PathKernels& path = active_path();
  bool finite = true;
  run_pipeline((length + chunk - 1) / chunk,
               [&](std::uint64_t step) {
                 const std::size_t start = step * chunk;
                 copy(cell(rank_, sequence_ + step), x + start * item, std::min(chunk, length - start) * item);
               },
               [&](std::uint64_t step) {
                 const std::size_t start = step * chunk, size = std::min(chunk, length - start);
                 const void* inputs[few_ranks];
                 for (std::size_t offset = 0; offset < size; offset += block) {
                   const std::size_t count = std::min(block, size - offset);
                   char* own = x + (start + offset) * item;
                   for (int peer = 0; peer < ranks_; ++peer)
                     inputs[peer] = peer == rank_ ? own : cell(peer, sequence_ + step) + offset * item;
                   sum(own, dtype, inputs, ranks_, dtype, count, scale);
                   finite &= path.is_finite[code_of(dtype)](own, count);
                 }
               },
               &call);
  return finite;
}

bool SharedMemory::reduce_scatter(void* x, Dtype dtype, std::size_t length, float scale, float* out, const float* add, Call call) {
  const IeeeScope ieee;
  return reduce_steps(x, dtype, length, scale, out, add, &call);
}

bool SharedMemory::reduce_steps(void* data, Dtype dtype, std::size_t length, float scale, float* out, const float* add,
                                const Call* call) {
  char* x = static_cast<char*>(data);
  const std::size_t item = item_size(dtype);
  // A cell holds one part for each rank that owns a shard. If every rank owns a shard, a cell has no part for the rank that
  // publishes it.
  const bool all_own = ranks_ == shards_;
  const int parts = std::max(1, all_own ? shards_ - 1 : shards_);
  const std::size_t chunk = cell_bytes / item / parts / 16 * 16;  // elements of a part, a multiple of 16 so that parts are aligned
  const auto part_offset = [&](int publisher, int owner) {
    return (all_own && owner > publisher ? owner - 1 : owner) * chunk * item;
  };
  std::size_t longest = 0;
  for (int i = 0; i < shards_; ++i)
    longest = std::max(longest, shard_begin(length, shards_, i + 1) - shard_begin(length, shards_, i));
  const std::size_t begin = rank_ < shards_ ? shard_begin(length, shards_, rank_) : 0;
  const std::size_t end = rank_ < shards_ ? shard_begin(length, shards_, rank_ + 1) : 0;
  const PathKernels& path = active_path();
  std::vector<const void*> inputs(ranks_);
  alignas(64) float sums[block];
  bool finite = true;
  run_pipeline((longest + chunk - 1) / chunk,
               [&](std::uint64_t step) {
                 for (int owner = 0; owner < shards_; ++owner) {
                   if (owner == rank_) continue;
                   const std::size_t first = shard_begin(length, shards_, owner) + step * chunk;
                   const std::size_t last = std::min(first + chunk, shard_begin(length, shards_, owner + 1));
                   if (first < last)
                     copy(cell(rank_, sequence_ + step) + part_offset(rank_, owner), x + first * item, (last - first) * item);
                 }
               },
               [&](std::uint64_t step) {
                 const std::size_t first = begin + step * chunk, last = std::min(first + chunk, end);
                 for (std::size_t at = first; at < last; at += block) {
                   const std::size_t count = std::min(block, last - at);
                   char* own = x + at * item;
                   for (int peer = 0; peer < ranks_; ++peer)
                     inputs[peer] =
                         peer == rank_ ? own : cell(peer, sequence_ + step) + part_offset(peer, rank_) + (at - first) * item;
                   if (out == nullptr) {
                     sum(own, dtype, inputs.data(), inputs.size(), dtype, count, scale);
                     finite &= path.is_finite[code_of(dtype)](own, count);
                   } else {
                     sum(sums, Dtype::f32, inputs.data(), inputs.size(), dtype, count, scale);
                     if (add != nullptr) path.add_f32(sums, sums, add + (at - begin), count, 1.0f);
                     finite &= path.is_finite[code_of(Dtype::f32)](sums, count);
                     stream_copy(out + (at - begin), sums, count * sizeof(float));
                   }
                 }
               },
               call);
  if (out != nullptr) end_stream();
  return finite;
}

void SharedMemory::check(Call call) {
  enter(call, [] {});
}

void SharedMemory::all_gather(void* x, std::size_t item, std::size_t length, const std::uint64_t* bounds, Call call) {
  gather_steps(x, item, length, bounds, true, &call);
}

void SharedMemory::gather_steps(void* data, std::size_t item, std::size_t length, const std::uint64_t* bounds, bool stream,
                                const Call* call) {
  char* x = static_cast<char*>(data);
  const auto begin_of = [&](int shard) {
    return bounds != nullptr ? static_cast<std::size_t>(bounds[shard]) : shard_begin(length, shards_, shard);
  };
  const std::size_t chunk = cell_bytes / item;
  std::size_t longest = 0;
  for (int i = 0; i < shards_; ++i) longest = std::max(longest, begin_of(i + 1) - begin_of(i));
  if (ranks_ == 1) longest = 0;
  run_pipeline((longest + chunk - 1) / chunk,
               [&](std::uint64_t step) {
                 if (rank_ >= shards_) return;
                 const std::size_t first = begin_of(rank_) + step * chunk, last = std::min(first + chunk, begin_of(rank_ + 1));
                 if (first < last) copy(cell(rank_, sequence_ + step), x + first * item, (last - first) * item);
               },
               [&](std::uint64_t step) {
                 for (int owner = 0; owner < shards_; ++owner) {
                   if (owner == rank_) continue;
                   const std::size_t first = begin_of(owner) + step * chunk, last = std::min(first + chunk, begin_of(owner + 1));
                   if (first < last) copy_out(x + first * item, cell(owner, sequence_ + step), (last - first) * item, stream);
                 }
               },
               call);
  if (stream) end_stream();
}

}  // namespace topkube
