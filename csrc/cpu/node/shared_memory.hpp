// Collectives among the ranks of one node, through a small window of memory that all of them map.
//
// Every rank owns a slot (counters on separate cache lines) and a ring of cells. A collective is a pipeline of steps. In each
// step a rank publishes a cell (a copy of the part of its array that other ranks need) and takes the cells that other ranks
// published. Cells stay in the last-level cache, so an array of any length is read from memory once and written once. The window
// has a few megabytes, for buckets of any size.
//
// Sums are added in the order of local ranks, in float32, so their bits depend neither on chunks nor on timing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "cpu/dtype.hpp"

namespace topkube {

// The deadline has passed. `missing` lists the local ranks that have not entered the call.
struct NodeTimeout : std::runtime_error {
  explicit NodeTimeout(std::vector<int> ranks);
  std::vector<int> missing;
};

// Local ranks entered the same call with different signatures.
struct NodeMismatch : std::runtime_error {
  explicit NodeMismatch(std::vector<int> ranks);
  std::vector<int> different;
};

class SharedMemory {
 public:
  static constexpr std::size_t cell_bytes = 64 * 1024;

  // Returns the size in bytes of the window for `ranks` ranks with `cells` cells each. The window must be zero before the first
  // call.
  static std::size_t window_bytes(int ranks, int cells);

  // `shards`: arrays are cut into this many shards, one for each of the first local ranks.
  // `crowded`: the machine has more ranks than processors, so waiting ranks yield at once.
  SharedMemory(void* base, int rank, int ranks, int shards, int cells, bool crowded);

  // Runs in long waits, about ten times per second. If it throws, the call ends.
  std::function<void()> poll;

  // The arguments of every call: a signature that must be equal on all ranks, and how many seconds this rank waits for the others.
  struct Call {
    std::uint64_t signature;
    double deadline_seconds;
  };

  // Reduces x[length] over all ranks in place: their sum times `scale`. Returns true if every result is finite.
  bool all_reduce(void* x, Dtype dtype, std::size_t length, float scale, Call call);

  // Reduces this rank's shard of x: the sum times `scale`, plus `add` (float32, may be null). The result goes to `out` (float32),
  // or into x if `out` is null. Ranks without a shard only contribute. Returns true if every result of this rank is finite.
  bool reduce_scatter(void* x, Dtype dtype, std::size_t length, float scale, float* out, const float* add, Call call);

  // Returns when all ranks have entered the same call.
  void check(Call call);

  // Copies each shard of x from its owner to all other ranks. x has `length` elements of `item` bytes. `bounds` (shards + 1
  // offsets) replaces the even division, unless it is null.
  void all_gather(void* x, std::size_t item, std::size_t length, const std::uint64_t* bounds, Call call);

  static std::size_t shard_begin(std::size_t length, int shards, int shard) { return length * shard / shards; }

 private:
  struct Slot;

  Slot& slot(int rank) const;
  char* cell(int rank, std::uint64_t step) const;
  template <class PublishFirst>
  void enter(Call call, PublishFirst publish_first);
  bool have_all_reached(std::uint64_t steps, std::atomic<std::uint64_t> Slot::* counter, std::uint64_t& seen) const;
  bool have_all_published(std::uint64_t steps);
  bool have_all_taken(std::uint64_t steps);
  bool has_room(std::uint64_t step);
  void wake_sleepers();
  template <class Ready>
  void wait(Ready ready);
  template <class Publish, class Take>
  void run_pipeline(std::uint64_t steps, Publish publish, Take take, const Call* call);
  bool reduce_and_gather(char* x, Dtype dtype, std::size_t length, float scale, Call call);
  bool sum_on_every_rank(char* x, Dtype dtype, std::size_t length, float scale, Call call);
  bool reduce_steps(void* x, Dtype dtype, std::size_t length, float scale, float* out, const float* add, const Call* call);
  void gather_steps(void* x, std::size_t item, std::size_t length, const std::uint64_t* bounds, bool stream, const Call* call);

  char* base_;
  int rank_, ranks_, shards_, cells_;
  bool crowded_;
  bool has_failed_ = false;     // a wait has ended without its condition
  std::vector<int> missing_;    // the ranks that it waited for
  std::uint64_t calls_ = 0;     // calls that this rank has entered
  std::uint64_t sequence_ = 0;  // steps that this rank has finished, over all calls
  double ends_ = 0;             // the time (in seconds of the monotonic clock) at which the deadline of the call passes
  // The steps that all other ranks have published and taken, as far as this rank has seen.
  std::uint64_t published_ = 0, taken_ = 0;
};

}  // namespace topkube
