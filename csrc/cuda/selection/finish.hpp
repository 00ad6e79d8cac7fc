// `finish`: the work of `narrow`, `narrow` and `collect` in one kernel of one thread block cluster.
#pragma once

#include "collect.hpp"

namespace topkube {

// The most candidates for which `finish` is used: eight blocks read them in about the time of one launch. The length is bounded
// too, because eight blocks read all the data in a fallback.
constexpr u32 finish_threads = 512;
constexpr u64 cluster_candidates = 1'000'000, cluster_length = 32'000'000;

union FinishShared {
  NarrowShared narrow;
  CollectShared collect;
};

// The blocks of a cluster run at the same time, so they can wait for each other between the rounds. Blocks without a cluster
// cannot: for them, each round is a kernel.
template <class Source, class Value>
TOPKUBE_KERNEL(finish_threads) finish(Source source, Selection selection, u32* indices, Value* values, float* acc) {
  auto& shared = gpu::shared<FinishShared>();
  for (u32 round = 0; round < 2; ++round) {
    narrow_bins(source, selection, round, shared.narrow);
    gpu::sync_cluster();
  }
  collect_entries(source, selection, indices, values, acc, shared.collect);
}

}  // namespace topkube
