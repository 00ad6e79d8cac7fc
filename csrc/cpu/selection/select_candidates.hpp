// The exact selection from the candidates of a filter, for algorithms that call `filter_pass` themselves (MSTopK).
#pragma once

#include "cpu/selection/filter.hpp"
#include "cpu/selection/select.hpp"

namespace topkube {

// Selects exactly from the candidates of a filter with `plan`, or from the data again (at most three more passes) if there are too
// few or too many candidates.
Effort select_f32_from(const Candidates& candidates, const Plan& plan, const float* data, std::size_t length, std::size_t k,
                       int threads, std::uint32_t* indices, float* values);

}  // namespace topkube
