// The launches of selection: the values that the host computes in advance, the layout of the workspace, and the order of the
// kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "api.hpp"
#include "select.hpp"

namespace topkube {

template <class... Pointers>
bool are_aligned(Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

// Chooses the sample, the ranks of the bounds in the sample, and the room for candidates. Uses the formulas of
// csrc/cpu/selection/filter.cpp: how many samples are expected above the k-th magnitude, the bounds 4 standard deviations away, and
// room for the candidates above the lower bound. Bounds from the previous selection leave twice the entries that are selected, or
// as many as a sample leaves, and there is room for twice as many again.
inline void plan_candidates(Selection& selection) {
  const u64 length = selection.length, k = selection.k;
  selection.capacity = length;
  if (length <= all_candidates_length) return;
  if (k > length / 4) {
    selection.mode = from_data;
    selection.capacity = 0;
    return;
  }
  selection.samples = static_cast<u32>(std::min<u64>(most_samples, length / 2));
  selection.stratum = (length << 16) / selection.samples;
  const double per_sample = static_cast<double>(length) / selection.samples, expected = static_cast<double>(k) / per_sample;
  const double spread = 4 * std::sqrt(expected) + 8, low = expected + spread, high = expected - spread;
  selection.low_rank = std::min(selection.samples, static_cast<u32>(low));
  selection.high_rank = high >= 1 ? static_cast<u32>(high) : 0;
  selection.capacity = std::min(length, static_cast<u64>((low + 5 * std::sqrt(low) + 8) * per_sample));
  if (reuse && selection.previous) {
    selection.aim = std::max(2 * k, static_cast<u64>(low * per_sample));
    selection.capacity = std::max(selection.capacity, std::min(length, 2 * selection.aim));
  }
}

// Plans a selection, and takes its workspace from `arena`. `k`: the rank to find.
inline Selection lay_out(u64 length, u64 k, bool aligned, void* previous, void* state, Arena& arena) {
  Selection selection{};
  selection.aligned = aligned;
  selection.length = length;
  selection.k = k;
  selection.state = static_cast<State*>(state);
  selection.previous = static_cast<PreviousThreshold*>(previous);
  plan_candidates(selection);

  selection.tiles = (length + filter_tile - 1) / filter_tile;
  // A block of `collect` reads so many segments that they fill about one of its tiles, or fewer if most blocks would have none.
  const u64 per_segment = std::max<u64>(1, selection.capacity / selection.tiles);
  const u64 group = std::min<u64>(collect_tile / per_segment, selection.tiles / least_groups);
  selection.group = static_cast<u32>(std::clamp<u64>(group, 1, collect_threads));
  // It counts tiles of the data, or groups of segments.
  const u64 collect_tiles =
      std::max((length + collect_tile - 1) / collect_tile, (selection.tiles + selection.group - 1) / selection.group);

  selection.clear = arena.take<u32>(0);
  const u64 before = arena.used();
  selection.coarse = arena.take<u32>(coarse_bins);
  selection.fine = arena.take<u32>(upper_bins);
  selection.finest = arena.take<u32>(lower_bins);
  selection.collected[0] = arena.take<u64>(collect_tiles);
  selection.collected[1] = arena.take<u64>(collect_tiles);
  selection.clear_words = (arena.used() - before) / sizeof(u32);
  selection.segments = arena.take<u64>(selection.tiles);
  selection.indices = arena.take<u32>(selection.capacity);
  selection.values = arena.take<u32>(selection.capacity);
  return selection;
}

template <class Source>
void launch_prepare(gpu::Launcher& launcher, const Source& source, const Selection& selection) {
  launcher.launch<BlockScratch>(prepare<Source>, launcher.blocks_for(selection.clear_words, 2048, 4), prepare_threads, source,
                                selection);
}

template <class Source>
void launch_filter(gpu::Launcher& launcher, const Source& source, const Selection& selection) {
  if (selection.mode == from_data && !Source::writes) return;
  launcher.launch<FilterShared>(filter<Source>, launcher.blocks_for(selection.tiles, 1, filter_blocks), filter_threads, source,
                                selection);
}

// Launches both rounds of `narrow`. `source` reads the filtered data and writes nothing.
template <class Source>
void launch_narrow(gpu::Launcher& launcher, const Source& source, const Selection& selection) {
  for (u32 round = 0; round < 2; ++round) {
    launcher.launch<NarrowShared>(narrow<Source>, launcher.blocks_for(selection.length, 8 * narrow_threads, 1), narrow_threads,
                                  source, selection, round);
  }
}

template <class Source, class Value>
void launch_collect(gpu::Launcher& launcher, const Source& source, const Selection& selection, u32* indices, Value* values,
                    float* acc) {
  launcher.launch<CollectShared>(collect<Source, Value>, launcher.blocks_for(selection.length, collect_tile, collect_blocks),
                                 collect_threads, source, selection, indices, values, acc);
}

// Launches all kernels after the filter.
template <class Source, class Value>
void launch_rest(gpu::Launcher& launcher, const Source& source, const Selection& selection, u32* indices, Value* values,
                 float* acc) {
  if constexpr (cluster) {
    const bool is_small =
        selection.mode == from_candidates && selection.capacity <= cluster_candidates && selection.length <= cluster_length;
    if (is_small && launcher.can_launch_clusters()) {
      launcher.launch_cluster<FinishShared>(finish<Source, Value>, finish_threads, source, selection, indices, values, acc);
      return;
    }
  }
  launch_narrow(launcher, source, selection);
  launch_collect(launcher, source, selection, indices, values, acc);
}

}  // namespace topkube
