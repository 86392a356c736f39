"""What steps would cost on a named GPU, by roofline: no measurement, every formula and what it takes for granted below.

A step of a data-parallel rank that decodes R sequences of context C, with B rows in its target pass:

    target    per layer  max(FLOPs / peak, bytes / bandwidth) of attention, feed-forward and head apart, + launches
    experts   the rank's share of all rows; distinct experts are read once; the busiest rank's load counts
    exchange  dispatch and combine per mixture, all-reduces per layer where tp > 1
    drafter   one layer and the head over the B rows, and γ − 1 times more over R
    state     recurrent states of R sequences: read by the pass, read and written by its commit
    host      a fixed time

Taken for granted:
    - Data-parallel ranks hold like loads: B rows each. Routing is uniform and independent from row to row and layer to
      layer: of N experts, m active, T rows touch N · (1 − (1 − m/N)^T) distinct ones.
    - The load of an expert-parallel rank is Poisson; the busiest of n is about its mean plus its standard deviation
      times the expected largest of n normal draws (Blom 1958), unless `expert_skew` says how much busier it is.
    - Rows of one sequence read its cache once. All rows meet its whole context.
    - Parts follow one another; `overlap` is the share of an exchange that hides behind the computing of its layer.
    - Peaks are reached to `compute_share`, bandwidths to `memory_share` and `link_share`.
    - Prompts cost as other rows do. Passes run at the row count that they have, or at the next of `tiers`.

Shapes: B row counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from parallel.mesh import Mesh
from runtime.simulate.geometry import Geometry
from runtime.simulate.machines import Gpu
from runtime.verification.costs import CostCurve, Floats, Ints

STATE_BYTES = 4
"""Recurrent states are float32."""
ACTIVATION_BYTES = 2
"""Activations, what is combined or reduced, and heads are bfloat16."""
LAW_BYTES = 4
LAW_PASSES = 6
"""Reads and writes of a row's law over the vocabulary while it is cut, normalised, compared and drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """See above. weight_bytes: per parameter; 1 computes at the peak of FP8, 2 at that of bfloat16. cache_bytes: per
    value. dispatch_bytes: per value of a row on its way to an expert.

    layer_us: launches and waits of one layer, however few rows. exchange_us: latency of one exchange between ranks.
    host_ms: planning, links, booking of a step.
    """

    weight_bytes: int = 1
    cache_bytes: int = 2
    dispatch_bytes: int = 1
    compute_share: float = 0.6
    memory_share: float = 0.8
    link_share: float = 0.85
    overlap: float = 0.0
    expert_skew: float | None = None
    layer_us: float = 15.0
    exchange_us: float = 10.0
    host_ms: float = 0.5


def distinct_experts(experts: int, active: int, rows: Floats) -> Floats:
    """Expected number that `rows` rows touch under uniform routing: N · (1 − (1 − m/N)^T)."""
    return experts * (1 - (1 - active / experts) ** rows)


def busiest_load(mean: Floats, num_ranks: int) -> Floats:
    """Expected largest of `num_ranks` Poisson loads of one mean; no more than all of it."""
    if num_ranks == 1:
        return mean
    largest = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return np.minimum(mean + largest * np.sqrt(mean), mean * num_ranks)


class AnalyticCosts:
    """A `runtime.verification.costs.StepCosts` by formula. tiers: as there.

    Raises ValueError, which names the figure, where they contradict each other.
    """

    def __init__(
        self,
        gpu: Gpu,
        geometry: Geometry,
        mesh: Mesh,
        assumptions: Assumptions,
        *,
        gamma_max: int,
        tiers: tuple[int, ...] = (),
    ) -> None:
        if mesh.spreads_experts and geometry.experts % mesh.ep:
            raise ValueError(
                f"ep is {mesh.ep}, which does not divide the {geometry.experts} experts of {geometry.name}; change "
                "dp or tp, or set ep to 1"
            )
        if geometry.active > geometry.experts:
            raise ValueError(f"active is {geometry.active}, of {geometry.experts} experts; lower it")
        if assumptions.weight_bytes not in (1, 2):
            raise ValueError(f"weight_bytes is {assumptions.weight_bytes}; 1 is FP8, 2 is bfloat16")
        self.gpu, self.geometry, self.mesh, self.assumptions = gpu, geometry, mesh, assumptions
        self.gamma_max, self.tiers = gamma_max, tiers

    @property
    def weight_bytes_per_gpu(self) -> float:
        """Target and drafter."""
        geometry, mesh = self.geometry, self.mesh
        layers = geometry.moe_layers + 1
        experts = layers * geometry.experts * geometry.expert_params / (mesh.ep if mesh.spreads_experts else mesh.tp)
        drafter = geometry.attention_params + geometry.draft_projection + geometry.shared_params
        others = geometry.num_params - geometry.moe_layers * geometry.experts * geometry.expert_params + drafter
        heads = 2 * geometry.vocab * geometry.hidden
        per_param = self.assumptions.weight_bytes
        return (experts + (others - heads) / mesh.tp) * per_param + heads * ACTIVATION_BYTES / mesh.tp

    def memory_bytes(self, num_sequences: int, tokens: int) -> float:
        """Of one GPU: weights, caches and recurrent states of so many sequences of so many tokens."""
        geometry, tp = self.geometry, self.mesh.tp
        layers = geometry.attention_layers + 1
        cached = tokens * layers * geometry.cache_values * self.assumptions.cache_bytes
        state = geometry.recurrent_layers * geometry.state_values * STATE_BYTES / tp
        return self.weight_bytes_per_gpu + num_sequences * (cached / min(tp, geometry.cache_shards) + state)

    def at(self, num_sequences: int, context: float, *, sampled: bool = True) -> CostCurve:
        """As in the protocol."""
        return _Curve(self, num_sequences, context, sampled=sampled)

    def target_s(self, rows: Floats, num_sequences: int, context: float) -> Floats:
        """One target pass, of all layers and the head, without host time."""
        geometry, assumptions = self.geometry, self.assumptions
        attention = self._attention_s(rows, num_sequences, context)
        dense = self._dense_s(rows, geometry.dense_params)
        recurrent = self._dense_s(rows, geometry.recurrent_params) + self._state_s(num_sequences, 1)
        recurrent += self._memory_s(rows * geometry.record_values * ACTIVATION_BYTES / self.mesh.tp)
        return np.asarray(
            geometry.attention_layers * attention
            + geometry.recurrent_layers * recurrent
            + geometry.dense_layers * dense
            + geometry.moe_layers * self._mixture_s(rows)
            + geometry.num_layers * (assumptions.layer_us / 1e6 + self._reduce_s(rows))
            + self._head_s(rows)
        )

    def draft_s(self, rows: Floats, num_sequences: int, context: float) -> Floats:
        """One pass of the drafter: its layer over `rows`, the head over the sequences."""
        layer = self._dense_s(rows, self.geometry.draft_projection) + self._attention_s(rows, num_sequences, context)
        launches = self.assumptions.layer_us / 1e6 + self._reduce_s(rows)
        return layer + self._mixture_s(rows) + launches + self._head_s(np.array(float(num_sequences)))

    def verify_s(self, rows: Floats, *, sampled: bool) -> Floats:
        """Laws of the target's rows, compared with the drafts and drawn from, on one rank of those that share them;
        where all are greedy, one search."""
        return self._memory_s(rows * self.geometry.vocab * LAW_BYTES * (LAW_PASSES if sampled else 1))

    def commit_s(self, num_sequences: int) -> float:
        """Recurrent states moved on by the accepted rows."""
        return float(self.geometry.recurrent_layers * self._state_s(num_sequences, 2))

    def _attention_s(self, rows: Floats, num_sequences: int, context: float) -> Floats:
        """Projections, and scores over the cache: a layer's, on one of the ranks that share its heads."""
        geometry, assumptions, tp = self.geometry, self.assumptions, self.mesh.tp
        cached = num_sequences * context * geometry.cache_values * assumptions.cache_bytes
        read = self._memory_s(np.asarray(cached / min(tp, geometry.cache_shards)))
        scored = rows * context * geometry.attention_flops / tp / (self.gpu.bf16_flops * assumptions.compute_share)
        return self._dense_s(rows, geometry.attention_params) + np.maximum(read, scored)

    def _mixture_s(self, rows: Floats) -> Floats:
        """A mixture: its shared expert, the busiest rank's experts, dispatch and combine."""
        geometry, mesh = self.geometry, self.mesh
        shared = self._dense_s(rows, geometry.shared_params)
        if not mesh.spreads_experts:
            touched = distinct_experts(geometry.experts, geometry.active, rows)
            flops = 2 * rows * geometry.active * geometry.expert_params / mesh.tp
            read = touched * geometry.expert_params * self.assumptions.weight_bytes / mesh.tp
            return shared + np.maximum(flops / self._weight_flops, self._memory_s(read))
        all_rows = rows * mesh.dp
        touched = distinct_experts(geometry.experts, geometry.active, all_rows) / mesh.ep
        pairs = all_rows * geometry.active / mesh.ep
        skew = self.assumptions.expert_skew
        busiest = busiest_load(pairs, mesh.ep) if skew is None else pairs * skew
        read = self._memory_s(touched * geometry.expert_params * self.assumptions.weight_bytes)
        experts = np.maximum(2 * busiest * geometry.expert_params / self._weight_flops, read)
        computing = shared + experts
        exchange = self._exchange_s(pairs)
        hidden = np.minimum(exchange * self.assumptions.overlap, computing)
        return computing + exchange - hidden

    def _exchange_s(self, pairs: Floats) -> Floats:
        """Dispatch and combine of `pairs` (row, expert) pairs per rank. Those for the rank itself stay; the share that
        leaves its domain goes by the network, the rest by links, both at once."""
        gpu, mesh, assumptions = self.gpu, self.mesh, self.assumptions
        size = self.geometry.hidden * (assumptions.dispatch_bytes + ACTIVATION_BYTES)
        inside = min(mesh.ep, gpu.domain)
        by_link = pairs * size * (inside - 1) / mesh.ep / (gpu.link_rate * assumptions.link_share)
        by_network = pairs * size * (mesh.ep - inside) / mesh.ep / (gpu.network_rate * assumptions.link_share)
        return 2 * assumptions.exchange_us / 1e6 + np.maximum(by_link, by_network)

    def _reduce_s(self, rows: Floats) -> Floats:
        """Two all-reduces of a layer over the ranks that cut it, each as a scatter and a gather."""
        tp = self.mesh.tp
        if tp == 1:
            return np.zeros_like(rows)
        sent = 2 * rows * self.geometry.hidden * ACTIVATION_BYTES * (tp - 1) / tp
        rate = self.gpu.link_rate if tp <= self.gpu.domain else self.gpu.network_rate
        return 2 * (sent / (rate * self.assumptions.link_share) + self.assumptions.exchange_us / 1e6)

    def _head_s(self, rows: Floats) -> Floats:
        params = self.geometry.vocab * self.geometry.hidden / self.mesh.tp
        flops = self.gpu.bf16_flops * self.assumptions.compute_share
        return np.maximum(2 * rows * params / flops, self._memory_s(np.asarray(params * ACTIVATION_BYTES)))

    def _dense_s(self, rows: Floats, params: int) -> Floats:
        """Products of every row with weights that are cut over tp: computing or reading them, what is longer."""
        per_rank = params / self.mesh.tp
        read = self._memory_s(np.asarray(per_rank * self.assumptions.weight_bytes))
        return np.maximum(2 * rows * per_rank / self._weight_flops, read)

    def _state_s(self, num_sequences: int, times: int) -> Floats:
        """One layer's recurrent states of all sequences, read or written `times` times."""
        size = num_sequences * self.geometry.state_values * STATE_BYTES / self.mesh.tp
        return self._memory_s(np.asarray(times * size))

    def _memory_s(self, size_bytes: Floats) -> Floats:
        return np.asarray(size_bytes / (self.gpu.memory_rate * self.assumptions.memory_share))

    @property
    def _weight_flops(self) -> float:
        peak = self.gpu.fp8_flops if self.assumptions.weight_bytes == 1 else self.gpu.bf16_flops
        return peak * self.assumptions.compute_share


class _Curve:
    """Steps of one load; keeps what does not depend on the rows."""

    def __init__(self, costs: AnalyticCosts, num_sequences: int, context: float, *, sampled: bool) -> None:
        self._costs, self._num_sequences, self._context, self._sampled = costs, num_sequences, context, sampled
        own = np.array(float(num_sequences))
        self._more_s = float(costs.draft_s(own, num_sequences, context))
        self._fixed_s = costs.commit_s(num_sequences) + costs.assumptions.host_ms / 1000

    def step_ms(self, rows: Ints, *, waiting: int, gamma: int) -> Floats:
        """As in the protocol; a waiting draft costs by its row alone."""
        costs, load = self._costs, (self._num_sequences, self._context)
        padded = _padded(rows, costs.tiers)
        step_s = costs.target_s(padded, *load) + costs.verify_s(padded, sampled=self._sampled) + self._fixed_s
        if gamma:
            step_s = step_s + costs.draft_s(padded, *load) + (gamma - 1) * self._more_s
        return np.asarray(step_s * 1000)


def _padded(rows: Ints, tiers: tuple[int, ...]) -> Floats:
    """The next tier; what is beyond the last runs as it is."""
    counts = np.asarray(rows)
    if tiers:
        sizes = np.asarray(tiers)
        place = np.searchsorted(sizes, counts)
        counts = np.where(place < len(sizes), sizes[np.minimum(place, len(sizes) - 1)], counts)
    return counts.astype(np.float64)
