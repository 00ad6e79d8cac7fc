// The table of the inner loops of every kernel, compiled once per path: TOPKUBE_PATH is the name of the path, and CMake sets the
// instruction set.
//
// This unit exports only its table. It uses no function of the standard library, because the linker could share that function
// with a unit for an older CPU.
#include "cpu/paths/path_kernels.hpp"

#include "cpu/dtype.hpp"
#include "cpu/paths/dense_loops.hpp"
#include "cpu/paths/plane_loops.hpp"
#include "cpu/paths/quantised_loops.hpp"
#include "cpu/paths/selection_loops.hpp"
#include "cpu/paths/sign_loops.hpp"
#include "cpu/paths/unary_loops.hpp"

#define TOPKUBE_TABLE_(path) path##_kernels
#define TOPKUBE_TABLE(path) TOPKUBE_TABLE_(path)
#define TOPKUBE_NAME_(path) #path
#define TOPKUBE_NAME(path) TOPKUBE_NAME_(path)

namespace topkube {

extern const PathKernels TOPKUBE_TABLE(TOPKUBE_PATH);
const PathKernels TOPKUBE_TABLE(TOPKUBE_PATH) = {
    .name = TOPKUBE_NAME(TOPKUBE_PATH),
    .widen = {widen<F32>, widen<BF16>, widen<F16>},
    .widen_add = {widen_add<F32>, widen_add<BF16>, widen_add<F16>},
    .narrow = {narrow<F32>, narrow<BF16>, narrow<F16>},
    .is_finite = {is_finite<std::uint32_t, 0x7f800000u>, is_finite<std::uint16_t, 0x7f80>, is_finite<std::uint16_t, 0x7c00>},
    .filter_bits = {filter<Bits32, std::uint32_t>, filter<Bits16, std::uint16_t>, filter<Bits16, std::uint16_t>},
    .filter_float = {filter<FloatSource<F32>, std::uint32_t>, filter<FloatSource<BF16>, std::uint16_t>,
                     filter<FloatSource<F16>, std::uint16_t>},
    .collect_between = collect_between,
    .accumulate_filter = {accumulate_filter<F32, std::uint32_t>, accumulate_filter<BF16, std::uint16_t>,
                          accumulate_filter<F16, std::uint16_t>},
    .summarise_magnitudes = {summarise_magnitudes<F32, std::uint32_t>, summarise_magnitudes<BF16, std::uint16_t>,
                             summarise_magnitudes<F16, std::uint16_t>},
    .add_f32 = add_f32,
    .low_rank_row = {low_rank_row<F32>, low_rank_row<BF16>, low_rank_row<F16>},
    .sign_pack = sign_pack,
    .sign_unpack_add = sign_unpack_add,
    .write_planes = write_planes,
    .read_planes = read_planes,
    .write_unary = write_unary,
    .quantised_scale = quantised_scale,
    .quantised_pack = quantised_pack,
    .quantised_unpack_add = quantised_unpack_add,
};

}  // namespace topkube
