"""Algorithms whose nodes send each other rows of bytes, which a codec (codecs.py, top_signs.py, top_levels.py) writes
and reads.

Training with error feedback in the weights (training/node_weights/) uses the codecs of such an algorithm for the
changes of the weights.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from topkube import kernels
from topkube.arrays import BFLOAT16, Array
from topkube.collectives.all_reduce import ShardAllReduce
from topkube.collectives.call import Call, find_own_shard, reserve_workspace
from topkube.collectives.codecs import (
    Codec,
    Integers,
    Rounded,
    Signs,
)
from topkube.collectives.exchange import Place
from topkube.collectives.halves import HalvableAllReduce, Halves
from topkube.collectives.request import Request
from topkube.collectives.rounds import Exchange, runs_compiled
from topkube.collectives.shard import Shard
from topkube.collectives.top_levels import TopLevels
from topkube.collectives.top_signs import TopSigns
from topkube.collectives.two_stage import TwoStage, cut_into_segments
from topkube.kernels.parts import count_sign_blocks, count_sign_bytes, view_signs
from topkube.telemetry import phases
from topkube.world import World


class CodecAllReduce(ShardAllReduce):
    """An algorithm whose nodes send a row each to all other nodes; from `two_stage_from` nodes on, in two stages
    (two_stage.py). The part of the sum that the owner of a segment does not send becomes its residual there."""

    only_accumulates = True

    @abstractmethod
    def codec(self, places: Sequence[slice], length: int, wire: str, is_always_dense: bool = False) -> Codec:
        """Return the codec for `length` values, in which each of `places` holds one tensor. `is_always_dense`
        is True for small tensors (biases, norms), which are only rounded."""

    def exchange(self, call: Call, shard: Shard) -> None:
        if not self.algorithm.has_two_stages(shard.world.nodes):
            super().exchange(call, shard)
            return
        stage, change = self.build_stage(shard), shard.accumulate()
        call.check_between_nodes()
        sent = stage.exchange(call, partial(stage.pack, change), change[stage.segment])
        self.end_two_stages(shard, stage, partial(stage.write, rows=sent))

    def begin(self, world: World, request: Request, place: Place) -> tuple[Call, Shard, Exchange | None, int]:
        """Begin the all-reduce of an array that has a residual, in two stages. Return the call, this rank's shard, the
        exchange that the caller runs between the nodes (None without a shard), and the bytes that this rank sends in
        it. The shard holds the result when the exchange ends; the caller gathers the shards of the node then, and
        checks `Shard.finite`."""
        call, shard = self.reduce_inside(world, request)
        if world.cross_comm is None:
            return call, shard, None, 0
        return call, shard, *self.begin_between(call, shard, place)

    def begin_between(self, call: Call, shard: Shard, place: Place) -> tuple[Exchange, int]:
        """Return the exchange of a shard between the nodes for `begin`, and the bytes that this rank sends in it."""
        stage, change = self.build_stage(shard), shard.accumulate()

        def travel() -> Exchange:
            sent = yield from stage.travel(call, partial(stage.pack, change), change[stage.segment], place)
            with phases.current.timed("select", bucket=call.traced_bucket):
                self.end_two_stages(shard, stage, partial(stage.write, rows=sent))

        return travel(), stage.sent_bytes

    def build_stage(self, shard: Shard) -> TwoStage:
        """Return the two stages of a shard. `end_two_stages` follows when the owners' rows have arrived."""
        world, length, wire = shard.world, len(shard.values), shard.request.wire

        def codec_of(places: list[slice], length: int) -> Codec:
            return self.codec(places, length, wire)

        return TwoStage(codec_of, [slice(0, length)], length, world.node, [1.0] * world.nodes)

    def end_two_stages(self, shard: Shard, stage: TwoStage, write: Callable[[Any], object]) -> None:
        """Put what the owners sent into the shard: `write` writes it into an array of float32."""
        shard.finite.append(stage.is_finite)
        total = self._find_float32_values(shard)
        write(total)
        self._store(shard, total)

    def pack(self, shard: Shard) -> Any:
        wire = shard.request.wire
        rows = shard.rows(max(self.codec([slice(0, n)], n, wire).row_bytes for n in shard.lengths))
        total = shard.accumulate()
        codec = self.codec([slice(0, len(total))], len(total), wire)
        shard.finite.append(codec.pack(total, rows[shard.world.node]))
        return rows

    def unpack(self, shard: Shard, received: Any) -> None:
        length, total = len(shard.values), self._find_float32_values(shard)
        codec = self.codec([slice(0, length)], length, shard.request.wire)
        codec.unpack(total, list(received), [1.0] * len(received))
        self._store(shard, total)

    @staticmethod
    def _find_float32_values(shard: Shard) -> Any:
        """Return the shard, or a buffer of its length if it is not float32."""
        is_wide = shard.request.dtype == "float32"
        values: Any = shard.values if is_wide else shard.scratch("float32 values", len(shard.values), "float32")
        return values

    @staticmethod
    def _store(shard: Shard, total: Any) -> None:
        if total is not shard.values:
            kernels.cast_(shard.values, total)
            shard.check(shard.values)  # the sum may be beyond the range of 16 bits


class OneBit(CodecAllReduce):
    """Every node sends the signs of its values, and the mean magnitude of each block of 256. Small tensors are rounded
    to bf16 instead."""

    def codec(self, places: Sequence[slice], length: int, wire: str, is_always_dense: bool = False) -> Codec:
        return Rounded(length, "bf16") if is_always_dense else Signs(places)


class TopKOneBit(CodecAllReduce):
    """Every node sends the indices, the signs and the mean magnitude of the largest tenth of its values. Small tensors
    are rounded to bf16 instead."""

    def codec(self, places: Sequence[slice], length: int, wire: str, is_always_dense: bool = False) -> Codec:
        return Rounded(length, "bf16") if is_always_dense else TopSigns(places)


class SparseLoCo(CodecAllReduce):
    """Every node sends the indices of the largest 1/32 of its values, with two bits each (Sarfi et al., "Communication
    efficient LLM pre-training with SparseLoCo", 2025). Small tensors are rounded to bf16 instead."""

    def codec(self, places: Sequence[slice], length: int, wire: str, is_always_dense: bool = False) -> Codec:
        return Rounded(length, "bf16") if is_always_dense else TopLevels(places)


class QuantisedAllReduce(CodecAllReduce, HalvableAllReduce):
    """Every node sends all its values as integers of `bits` bits, in two stages: to the owners of segments, which send
    the sums in the same format (Tang et al., "DoubleSqueeze", 2019). The rest of both stages stays in residuals. With
    DeAR, each stage is a half."""

    bits: ClassVar[int]

    def codec(self, places: Sequence[slice], length: int, wire: str, is_always_dense: bool = False) -> Codec:
        return Integers(places, self.bits)

    def begin_between(self, call: Call, shard: Shard, place: Place) -> tuple[Exchange, int]:
        links = shard.world.cross_links
        if shard.request.dtype != "float32" or not runs_compiled(links):
            return super().begin_between(call, shard, place)
        return self._begin_on_links(call, shard, links, place)

    def _begin_on_links(self, call: Call, shard: Shard, links: Any, place: Place) -> tuple[Exchange, int]:
        """Do what `begin_between` does, with the same bits, in compiled code: the thread that waits for the messages
        adds up and packs."""
        bounds = cut_into_segments(len(shard.values), links.size)
        integers = links.prepare_integers(shard.accumulate(), shard.values, bounds, self.bits, place.tag)
        phases.current.add_computations("select", integers.take_computations(), call.traced_bucket)

        def travel() -> Exchange:
            yield from call.await_greetings()
            yield links.begin_integers(integers)
            shard.finite.append(integers.is_finite)
            phases.current.add_computations("select", integers.take_computations(), call.traced_bucket)

        return travel(), integers.sent_bytes

    def begin_in_halves(self, world: World, request: Request, place: Place, kept: str) -> Halves:
        call, shard = self.reduce_inside(world, request)
        # Collectives in other threads may use the scratch buffers of the world before the second half ends.
        shard = replace(shard, scratch=partial(_find_scratch_of_halves, world))
        if world.cross_comm is None:
            return Halves(call, None, 0, lambda comm: iter(()), (0, 0), shard.finite)
        stage, change = self.build_stage(shard), shard.accumulate()
        sent_first, sent_second = stage.sent_bytes_of_stages
        first_element, _ = find_own_shard(world, request.length)
        own, means = stage.segment, list[Array]()

        def travel_to_owners() -> Exchange:
            pack = partial(stage.pack, change)
            means.extend((yield from stage.travel_to_owners(call, pack, change[own], place, kept)))
            shard.finite.append(stage.is_finite)
            self._write_segments(call, shard, stage, means, [world.node])

        def travel_from_owners(comm: Any) -> Exchange:
            phases.current.sent(inter=sent_second)
            yield from stage.travel_from_owners(comm, means, place.tag)
            others = [node for node in range(world.nodes) if node != world.node]
            self._write_segments(call, shard, stage, means, others)

        result = first_element + own.start, first_element + own.stop
        return Halves(call, travel_to_owners(), sent_first, travel_from_owners, result, shard.finite)

    def _write_segments(
        self, call: Call, shard: Shard, stage: TwoStage, means: Sequence[Array], owners: Sequence[int]
    ) -> None:
        """Put what these owners sent into their segments of the shard."""
        with phases.current.timed("select", bucket=call.traced_bucket):
            total = self._find_float32_values(shard)
            for owner in owners:
                stage.write_segment(total, means, owner)
                if total is not shard.values:
                    segment = slice(*stage.bounds[owner : owner + 2])
                    kernels.cast_(shard.values[segment], total[segment])
                    if owner == shard.world.node:  # other owners check theirs, before ranks agree on the step
                        shard.check(shard.values[segment])


def _find_scratch_of_halves(world: World, name: str, length: int, dtype: str) -> Array:
    return reserve_workspace(world, f"scratch {name} of halves", length, dtype)


class Int8(QuantisedAllReduce):
    bits = 8


class Int4(QuantisedAllReduce):
    bits = 4


class Int3(QuantisedAllReduce):
    bits = 3


class LocalSgd(CodecAllReduce):
    """Every node sends all its values, rounded to `wire`."""

    def codec(self, places: Sequence[slice], length: int, wire: str, is_always_dense: bool = False) -> Codec:
        return Rounded(length, wire)


def _draw_signs_of_zeros(values: Array, node: int) -> None:
    """Give each 0 in `values` a random sign bit. If all zeros had one sign, weights without a gradient, such as those
    of padding, would move in one direction in every step. The signs follow from the values and the node, so a run that
    resumes draws the same."""
    zeros = np.flatnonzero(values == 0)
    if len(zeros):
        signs = np.random.default_rng((zlib.crc32(values.data), node)).integers(2, size=len(zeros))
        values[zeros] = np.copysign(np.float32(0), signs - np.float32(0.5))


class SignSgd(ShardAllReduce):
    """Majority vote (Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant",
    2019). An element gets the sign of most ranks, or 0 if the votes are even; a node votes for all its ranks. Its
    magnitude is the mean |x| of its block of 256 elements, averaged over the nodes, so that the result has the unit of
    a gradient. There is no residual: what was not sent is lost. A bit has no 0: a node that has 0 votes at random."""

    def pack(self, shard: Shard) -> Any:
        values = shard.scratch("values", len(shard.values), "float32")
        values[:] = shard.values
        _draw_signs_of_zeros(values, shard.world.node)
        rows = shard.rows(max(map(count_sign_bytes, shard.lengths)))
        scales, bits = view_signs(rows[shard.world.node], len(values))
        shard.finite.append(kernels.sign_pack_(values, scales, bits)[2])
        return rows

    def unpack(self, shard: Shard, received: Any) -> None:
        length = len(shard.values)
        parts = [view_signs(row, length) for row in received]
        scales = np.zeros(count_sign_blocks(length), np.float32)
        for node_scales, _ in parts:
            scales += node_scales.view(BFLOAT16).astype(np.float32)
        ones = np.ones(len(scales), np.float32).astype(BFLOAT16).view(np.uint16)
        votes = shard.scratch("values", length, "float32")
        votes[:] = 0
        weights = [float(len(ranks)) for ranks in shard.world.node_ranks]
        kernels.sign_unpack_add_(votes, [(ones, bits) for _, bits in parts], weights)
        np.sign(votes, out=votes)
        votes *= np.repeat(scales, kernels.SIGN_BLOCK)[:length]
        shard.values[:] = votes.astype(shard.values.dtype)
        if shard.request.dtype != "float32":
            shard.check(shard.values)
