// The sizes of the selection kernels, and the values that they pass to each other.
#pragma once

#include "variants.hpp"

namespace topkube {

constexpr u32 filter_tile = 2048;      // items of which a warp of `filter` appends the candidates at once
static_assert(filter_tile < 0x10000);  // a position fits in 16 bits
// The 2^14 counters of a block need 64 KiB of shared memory, which every device since sm_80 has.
constexpr u32 coarse_bits = 12, coarse_bins = 1u << coarse_bits, upper_bits = 14, upper_bins = 1u << upper_bits,
              lower_bins = 1u << (31 - upper_bits);
constexpr u32 filter_threads = 512, filter_blocks = 2, collect_threads = 256, narrow_threads = 1024, prepare_threads = 256;
constexpr u32 collect_blocks = 3, collect_steps = 16, collect_tile = collect_threads * collect_steps;
constexpr u32 least_groups = 128;  // as many blocks of `collect` share the segments of a small array
constexpr u32 samples_per_thread = 32, most_samples = prepare_threads * samples_per_thread;
static_assert(most_samples < 0x10000);        // two sample counts fit in one word
constexpr u64 all_candidates_length = 16384;  // up to this length every entry is a candidate

// The result that a selection keeps for the next selection from the same gradient, whose k-th magnitude is usually near. If all
// bytes are zero, nothing is kept. Any other contents are safe too: they only determine which entries become candidates.
struct PreviousThreshold {
  u64 length, k;          // the next selection must have the same
  u32 magnitude, margin;  // the k-th magnitude, and how far below it the next filter begins
};
static_assert(sizeof(PreviousThreshold) <= 32);  // the size that topkube/kernels allocates

enum Mode : u32 { from_candidates = 0, from_data = 1 };

// Values that the kernels pass to each other. At the end, the host reads from them how much work was done.
struct State {
  u32 mode;
  u32 least, most;  // the bounds of the filter; its bins cover least..most
  u32 base, bits;   // the k-th magnitude is in [base, base + 2^bits)
  // Selected are all magnitudes >= upper, and of the other magnitudes >= lower `between_count`, from number `first_between` on.
  u32 upper, lower;
  u32 collect_ticket;
  u32 filter_done, narrow_done[2], count_done;
  u64 rank;  // the rank of the k-th magnitude within its bin
  u64 first_between, between_count;
  u64 candidates;  // entries that reached `least`; more than the capacity if the buffer was full
  u64 above[2];    // mstopk: the number of magnitudes >= upper, and >= lower
  double mean;
  u32 largest;  // mstopk: the largest magnitude as bits of an fp32
  u32 nonfinite;
  float thresholds[2];
  u32 reused;  // 1 if the bounds come from the previous selection
};
static_assert(sizeof(State) <= 256);  // the size that topkube/kernels allocates

// The layout of the workspace, and the values that the host computes in advance.
struct Selection {
  u64 length, k;                     // k: the rank to find
  u32 mode;                          // from_data: k is so large that candidates do not pay off
  bool aligned;                      // all arrays that `filter` reads and writes are aligned to 16 bytes
  u32 samples, low_rank, high_rank;  // the bounds are the samples of these ranks, from the largest down
  u64 stratum, capacity;             // elements per sample (48.16 fixed point); room for candidates
  PreviousThreshold* previous;       // null if the caller keeps nothing
  u64 aim;                           // how many candidates the bounds from the previous selection should leave
  State* state;
  u32* coarse;        // the bins of filter
  u32* fine;          // the bins of the first narrow
  u32* finest;        // the bins of the second narrow
  u64* segments;      // of each tile of filter, where its candidates start << 16 | their number
  u64 tiles;          // of filter
  u32 group;          // segments that a block of `collect` reads at a time, at most one per thread
  u64* collected[2];  // prefix sums of collect's tiles
  u32* clear;         // the `clear_words` words from here on, which `prepare` sets to zero: from `coarse` to `collected`
  u64 clear_words;
  u32* indices;  // candidates
  u32* values;
};

}  // namespace topkube
