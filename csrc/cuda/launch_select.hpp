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

// `k`: the rank to find. Uses the formulas of csrc/cpu/selection/filter.cpp: how many samples are expected above the k-th
// magnitude, the bounds 4 standard deviations away, and room for the candidates above the lower bound. Bounds from the previous
// selection leave twice the entries that are selected, or as many as a sample leaves, and there is room for twice as many again.
inline Selection lay_out(u64 length, u64 k, u32 tile_items, bool aligned, void* previous, void* state, Arena& arena) {
  Selection s{};
  s.aligned = aligned;
  s.length = length;
  s.k = k;
  s.capacity = length;
  if (length > everything) {
    if (k > length / 4) {
      s.mode = from_data;
      s.capacity = 0;
    } else {
      s.samples = static_cast<u32>(std::min<u64>(most_samples, length / 2));
      s.stratum = (length << 16) / s.samples;
      const double per_sample = static_cast<double>(length) / s.samples, expected = static_cast<double>(k) / per_sample;
      const double spread = 4 * std::sqrt(expected) + 8, low = expected + spread, high = expected - spread;
      s.low_rank = std::min(s.samples, static_cast<u32>(low));
      s.high_rank = high >= 1 ? static_cast<u32>(high) : 0;
      s.capacity = std::min(length, static_cast<u64>((low + 5 * std::sqrt(low) + 8) * per_sample));
      if (reuse && previous) {
        s.aim = std::max(2 * k, static_cast<u64>(low * per_sample));
        s.capacity = std::max(s.capacity, std::min(length, 2 * s.aim));
      }
    }
  }
  const u64 filter_tiles = (length + tile_items - 1) / tile_items, collect_tiles = (length + collect_tile - 1) / collect_tile;
  constexpr u64 warps = collect_threads / 32, most_segments = 64;
  const u64 per_tile = std::max<u64>(1, s.capacity / filter_tiles), wanted_segments = collect_tile / per_tile / warps * warps;
  s.tiles = filter_tiles;
  s.group = static_cast<u32>(std::clamp(wanted_segments, warps, most_segments));
  s.state = static_cast<State*>(state);
  s.previous = static_cast<PreviousThreshold*>(previous);
  s.clear = arena.take<u32>(0);
  const u64 before = arena.used();
  s.coarse = arena.take<u32>(coarse_bins);
  s.fine = arena.take<u32>(upper_bins);
  s.finest = arena.take<u32>(lower_bins);
  s.filtered = arena.take<u64>(filter_tiles);
  s.collected[0] = arena.take<u64>(collect_tiles);
  s.collected[1] = arena.take<u64>(collect_tiles);
  s.clear_words = (arena.used() - before) / sizeof(u32);
  s.indices = arena.take<u32>(s.capacity);
  s.values = arena.take<u32>(s.capacity);
  return s;
}

template <class Source>
constexpr u32 filter_tile() {
  return filter_threads * Source::steps;
}

template <class Source>
void launch_prepare(gpu::Launcher& launcher, const Source& source, const Selection& s) {
  launcher.launch<BlockScratch>(prepare<Source>, launcher.blocks_for(s.clear_words, 2048, 4), prepare_threads, source, s);
}

template <class Source>
void launch_filter(gpu::Launcher& launcher, const Source& source, const Selection& s) {
  if (s.mode == from_data && !Source::writes) return;
  launcher.launch<FilterShared>(filter<Source>, (s.length + filter_tile<Source>() - 1) / filter_tile<Source>(), filter_threads,
                                source, s);
  if (segments && s.mode != from_data) launcher.launch<FilterShared>(place_rank, 1, narrow_threads, s);
}

// Launches the kernels after the filter. `source` reads the filtered data and writes nothing.
template <class Source>
void launch_narrow(gpu::Launcher& launcher, const Source& source, const Selection& s) {
  for (u32 round = 0; round < 2; ++round) {
    launcher.launch<NarrowShared>(narrow<Source>, launcher.blocks_for(s.length, 8 * narrow_threads, 1), narrow_threads, source, s,
                                  round);
  }
}

template <class Source, class Value>
void launch_collect(gpu::Launcher& launcher, const Source& source, const Selection& s, u32* indices, Value* values, float* acc) {
  launcher.launch<CollectShared>(collect<Source, Value>, launcher.blocks_for(s.length, collect_tile, 8), collect_threads, source, s,
                                 indices, values, acc);
}

// Launches all kernels after the filter.
template <class Source, class Value>
void launch_rest(gpu::Launcher& launcher, const Source& source, const Selection& s, u32* indices, Value* values, float* acc) {
  if constexpr (cluster) {
    const bool is_small = s.mode == from_candidates && s.capacity <= cluster_candidates && s.length <= cluster_length;
    if (is_small && launcher.can_launch_clusters()) {
      launcher.launch_cluster<FinishShared>(finish<Source, Value>, finish_threads, source, s, indices, values, acc);
      return;
    }
  }
  launch_narrow(launcher, source, s);
  launch_collect(launcher, source, s, indices, values, acc);
}

}  // namespace topkube
