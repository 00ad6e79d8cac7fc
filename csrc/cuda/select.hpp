// Selection on the GPU: the same entries as csrc/cpu/selection/select.hpp, bit for bit.
//
// Five kernels run on one stream. Counts and decisions stay on the device, so the sequence of kernels is the same for all data.
//   prepare   clears the workspace; one block samples the data and computes a lower and an upper bound of the k-th magnitude
//   filter    reads the data once, appends the entries that reach the lower bound, and counts them in 4,096 bins; each tile of the
//             data appends a segment, in any order of the tiles
//   narrow    runs twice: counts the bin of the k-th magnitude in finer bins, until one magnitude is left
//   collect   writes the candidates above the k-th magnitude, and the first of those that equal it, in the order of the tiles
// If the caller keeps a PreviousThreshold, `prepare` takes the bounds from it, in place of a sample.
// If there are too few or too many candidates, or if k is more than a quarter of the data, `narrow` counts the data itself (the
// upper 14 bits, then the rest) and `collect` reads the data. These are four passes at most, as on the CPU.
//
// A build can choose a variant (selection/variants.hpp): TOPKUBE_CUDA_CLUSTER replaces `narrow`, `narrow` and `collect` by `finish`,
// one kernel of one cluster, if there are few candidates.
#pragma once

#include "selection/collect.hpp"
#include "selection/filter.hpp"
#include "selection/finish.hpp"
#include "selection/narrow.hpp"
#include "selection/prepare.hpp"
