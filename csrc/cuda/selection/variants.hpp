// The variants of the selection kernels that a build can choose (-DTOPKUBE_CUDA_DEFINES="-DTOPKUBE_CUDA_VECTOR=0"), to compare them
// on a device. They return the same bits.
#pragma once

#include "../device.hpp"

namespace topkube {

#ifndef TOPKUBE_CUDA_VECTOR
#define TOPKUBE_CUDA_VECTOR 1  // load 16 bytes per instruction, if arrays are aligned
#endif
#ifndef TOPKUBE_CUDA_AHEAD
#define TOPKUBE_CUDA_AHEAD 8  // loads in flight per thread in `narrow`
#endif
#ifndef TOPKUBE_CUDA_CLUSTER
#define TOPKUBE_CUDA_CLUSTER 0  // one kernel of one cluster in place of `narrow`, `narrow` and `collect`, for few candidates
#endif
#ifndef TOPKUBE_CUDA_REUSE
#define TOPKUBE_CUDA_REUSE 1  // begin at the k-th magnitude of the previous selection, if the caller keeps it
#endif
constexpr bool vector_loads = TOPKUBE_CUDA_VECTOR != 0;
constexpr bool cluster = TOPKUBE_CUDA_CLUSTER != 0;
constexpr bool reuse = TOPKUBE_CUDA_REUSE != 0;
constexpr u32 narrow_ahead = TOPKUBE_CUDA_AHEAD;

}  // namespace topkube
