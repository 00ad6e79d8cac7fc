// Collectives among the ranks of one node, through a small piece of memory that all of them map.
//
// Every rank owns a slot: counters on cache lines of their own, and a ring of cells. A collective is a pipeline of steps. In each
// step a rank publishes a cell (a copy of the part of its array that others need) and takes what the others published. Cells are
// small enough to stay in the last-level cache, so an array is read from memory once and written once, whatever its length; and
// the mapped memory is a few megabytes, whatever the bucket.
//
// Sums are taken in the order of local ranks, in float32, so their bits depend neither on chunks nor on timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "dtype.hpp"

namespace topkube {

// The deadline passed; `missing` are the local ranks that have not entered the call.
struct NodeTimeout : std::runtime_error {
  explicit NodeTimeout(std::vector<int> ranks);
  std::vector<int> missing;
};

// Local ranks entered one call with different signatures.
struct NodeMismatch : std::runtime_error {
  explicit NodeMismatch(std::vector<int> ranks);
  std::vector<int> different;
};

class SharedMemory {
 public:
  static constexpr std::size_t cell_bytes = 64 * 1024;

  // Bytes to map for `ranks` ranks with `cells` cells each. They must be zero before the first rank makes a call.
  static std::size_t bytes(int ranks, int cells);

  // `shards`: an array is cut into that many parts, one for each of the first local ranks.
  // `crowded`: more ranks than processors, on the whole machine: waits give way at once.
  SharedMemory(void* base, int rank, int ranks, int shards, int cells, bool crowded);

  // Called in long waits, about ten times a second; it may throw to leave the call.
  std::function<void()> poll;

  // What every call carries: a signature that must be the same on all ranks, and the seconds this rank waits for the others.
  struct Call {
    std::uint64_t signature;
    double deadline;
  };

  // Reduces x[length] over all ranks in place: their sum times `scale`. Returns whether every result is finite.
  bool all_reduce(void* x, Dtype dtype, std::size_t length, float scale, Call call);

  // Reduces this rank's shard of x: the sum times `scale`, plus `add` (float32, may be null). The result goes to `out` (float32)
  // or, where that is null, into x. Ranks without a shard only give. Returns whether every result of this rank is finite.
  bool reduce_scatter(void* x, Dtype dtype, std::size_t length, float scale, float* out, const float* add, Call call);

  // Returns once all ranks have entered the same call.
  void check(Call call);

  // Copies each shard of x from the rank that owns it to all others. `bounds` (shards + 1 offsets) replaces the even cut.
  void all_gather(void* x, std::size_t item, std::size_t length, const std::uint64_t* bounds, Call call);

  static std::size_t shard_begin(std::size_t length, int shards, int shard) { return length * shard / shards; }

 private:
  struct Slot;

  Slot& slot(int rank) const;
  char* cell(int rank, std::uint64_t step) const;
  void enter(Call call);
  bool all_published(std::uint64_t steps);
  bool all_taken(std::uint64_t steps);
  void tell();
  template <class Ready>
  void wait(Ready ready);
  template <class Publish, class Take>
  void pipeline(std::uint64_t steps, Publish publish, Take take);
  bool reduce_steps(void* x, Dtype dtype, std::size_t length, float scale, float* out, const float* add);
  void gather_steps(void* x, std::size_t item, std::size_t length, const std::uint64_t* bounds, bool stream);

  char* base_;
  int rank_, ranks_, shards_, cells_;
  bool crowded_;
  std::uint64_t calls_ = 0;     // calls that this rank has entered
  std::uint64_t sequence_ = 0;  // steps that this rank has finished, over all calls
  double ends_ = 0;             // when the deadline of the call passes
  std::uint64_t published_ = 0, taken_ = 0;  // what all others are known to have published and taken
};

}  // namespace topkube
