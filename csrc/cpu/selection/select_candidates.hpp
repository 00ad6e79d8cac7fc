// The exact selection from the candidates of a filter, for an algorithm that calls `filter_chunks` itself (MSTopK).
#pragma once

#include "cpu/selection/filter.hpp"
#include "cpu/selection/select.hpp"

namespace topkube {

// Selects exactly from the candidates of a filter with `plan`, or from the data again (at most three more passes) if there are too
// few or too many candidates.
Effort select_f32_from_candidates(const Candidates& candidates, const FilterPlan& plan, const float* data, std::size_t length,
                                  std::size_t k, int threads, std::uint32_t* indices, float* values);

}  // namespace topkube
