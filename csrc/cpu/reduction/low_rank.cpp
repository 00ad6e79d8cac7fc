#include "cpu/reduction/low_rank.hpp"

#include "cpu/elements.hpp"
#include "cpu/float_state.hpp"
#include "cpu/paths/path.hpp"

namespace topkube {

void low_rank_product(void* out, Dtype dtype, float* residual, const float* left, const float* right, std::size_t rows,
                      std::size_t columns, std::size_t rank, float weight) {
  const IeeeScope ieee;
  const auto multiply_row = active_path().low_rank_row[code_of(dtype)];
  for (std::size_t row = 0; row < rows; ++row)
    multiply_row(element_address(out, dtype, row * columns), residual + row * columns, left + row * rank, right, columns, rank,
                 weight);
}

}  // namespace topkube
