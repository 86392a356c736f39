"""Whatever the order of arrivals, steps, aborts, time limits, policies and losses: right tokens, one end each, nothing
leaks."""

from __future__ import annotations

import asyncio

from fakes.engine_house import no_pause
from fakes.front_sink import RecordingSink
from fakes.planners import FormulaCosts, FormulaProfiles
from fakes.requests import request
from fakes.worker import FakeSource, describe, true_stream
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.schema import SchedulerSettings, ServeSettings, SpeculationSettings
from runtime.engine import Engine
from runtime.front.errors import InvalidRequest, Overloaded, Unavailable
from runtime.in_force import SettingsInForce
from runtime.request import Finish, FinishReason, Request, sequences_of
from runtime.verification.policy import Dynamic, Fixed, Off, Policy
from workers.plan import LoadError, StepPlan, StepTimeout, WorkerLost

TIME_LIMIT = Finish(reason=FinishReason.TIME_LIMIT)
POLICIES = st.one_of(
    st.just(Off()),
    st.builds(Fixed, st.integers(0, 4)),
    st.builds(
        Dynamic,
        gamma_min=st.integers(0, 1),
        gamma_max=st.none() | st.integers(1, 4),
        itl_limit_ms=st.none() | st.floats(1, 60),
        min_survival=st.sampled_from([0.0, 0.5]),
    ),
)


class Schedules(RuleBasedStateMachine):
    """Drives an engine step by step; the fake ranks check each plan, the model here checks the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.requests: dict[int, Request] = {}
        self.waiting: list[int] = []
        self.num_seen_plans = 0
        self.aborted: set[int] = set()
        self.now_s = 0.0
        self.submitted_s: dict[int, float] = {}

    @initialize(
        dp=st.integers(1, 3),
        max_step_tokens=st.integers(6, 40),
        gamma=st.integers(0, 4),
        accept=st.sampled_from([0.0, 0.6, 1.0]),
        cliffs=st.sets(st.integers(2, 12), max_size=3),
    )
    def start(self, dp: int, max_step_tokens: int, gamma: int, accept: float, cliffs: set[int]) -> None:
        house = ServeSettings(
            scheduler=SchedulerSettings(max_step_tokens=max_step_tokens, max_waiting=5),
            speculation=SpeculationSettings(gamma=gamma, gamma_max=4, explore_every=5),
        )
        self.sink = RecordingSink()
        self.source = FakeSource(
            describe(num_slots=3, num_pages=(16, 16)), dp=dp, gated=True, max_step_tokens=max_step_tokens, accept=accept
        )
        profiles = FormulaProfiles(FormulaCosts(cliffs=tuple(cliffs)))
        self.engine = Engine(
            SettingsInForce(house),
            self.source,
            self.sink,
            profiles=profiles,
            pause=no_pause,
            clock=lambda: self.now_s,
        )
        self.run(self.engine.start())

    def run(self, what: object = None) -> object:
        """Runs a coroutine, then all that is ready, and looks at what was admitted meanwhile."""

        async def everything() -> object:
            result = await what if asyncio.iscoroutine(what) else None
            for _ in range(25):
                await asyncio.sleep(0)
            return result

        result = self.loop.run_until_complete(everything())
        plans = self.source.plans[self.num_seen_plans :]
        self.num_seen_plans += len(plans)
        admitted = {new.uid for plan in plans for batch in plan.batches for new in batch.admitted}
        self.waiting = [uid for uid in self.waiting if uid in admitted or TIME_LIMIT not in self.sink.ends[uid]]
        for plan in plans:
            self.check_admissions(plan)
        return result

    def check_admissions(self, plan: StepPlan) -> None:
        """Those that enter with a step are the first of the queue, in its order on each rank; with the first of a
        family all of it has left the queue, though the others enter by a fork."""

        def order(uid: int) -> tuple[int, int]:
            return (self.requests[uid].priority, uid)

        admitted = [[new.uid for new in batch.admitted if new.fork is None] for batch in plan.batches]
        entered = sorted((uid for uids in admitted for uid in uids), key=order)
        assert all(uids == sorted(uids, key=order) for uids in admitted)
        families: dict[str, list[int]] = {}
        for uid in sorted(self.waiting, key=order):
            families.setdefault(self.requests[uid].request_id, []).append(uid)
        heads = [uids[: None if len(self.requests[uids[0]].prompt) == 1 else 1] for uids in families.values()]
        assert entered == [uid for uids in heads for uid in uids][: len(entered)], "out of order"
        names = {self.requests[uid].request_id for uid in entered}
        self.waiting = [uid for uid in self.waiting if self.requests[uid].request_id not in names]

    @property
    def live(self) -> list[int]:
        return [uid for uid in self.requests if uid not in self.aborted and not self.sink.ends[uid]]

    @rule(
        num_prompt=st.integers(1, 22),
        max_tokens=st.integers(1, 14),
        priority=st.integers(-1, 1),
        stop_after=st.none() | st.integers(1, 16),
        eos=st.booleans(),
        max_drafts=st.none() | st.integers(0, 9),
        time_limit_s=st.none() | st.integers(1, 4),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(
        self,
        num_prompt: int,
        max_tokens: int,
        priority: int,
        stop_after: int | None,
        eos: bool,
        max_drafts: int | None,
        time_limit_s: int | None,
        n: int,
    ) -> None:
        uid = self.engine.next_uid(n)
        wanted = request(
            uid,
            num_prompt=num_prompt,
            max_tokens=max_tokens,
            priority=priority,
            eos=eos,
            stop_strings=() if stop_after is None else ("x",),
            stop_token_ids=(7, 8),
            max_drafts=max_drafts,
            time_limit_s=time_limit_s,
            n=n,
        )
        if stop_after is not None:
            # The later ones of a family stop later.
            self.sink.stop_after |= {uid + index: stop_after + index for index in range(n)}
        try:
            self.engine.submit(wanted)
        except (Overloaded, Unavailable):
            return
        except InvalidRequest:
            if n == 1:
                raise
            return
        for sequence in sequences_of(wanted):
            self.requests[sequence.uid], self.submitted_s[sequence.uid] = sequence, self.now_s
            self.waiting.append(sequence.uid)
        self.run()

    @rule(seconds=st.integers(1, 3))
    def let_time_pass(self, seconds: int) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.source.group.is_waiting)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.source.group.is_waiting:
                self.source.group.let_go()
                self.run()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.live))
        self.aborted.add(uid)
        if uid in self.waiting:
            self.waiting.remove(uid)
        self.engine.abort(uid)
        self.run()

    @rule(policy=POLICIES, priority=st.none() | st.integers(-1, 1))
    def switch_policy(self, policy: Policy, priority: int | None) -> None:
        """For all requests, or for those of one priority."""
        self.run(self.engine.policies.set(policy, priority=priority))

    @precondition(lambda self: self.engine.policies.state.classes)
    @rule()
    def follow_again(self) -> None:
        """One priority has no policy of its own any more."""
        self.run(self.engine.policies.set(None, priority=self.engine.policies.state.classes[0][0]))

    @rule(error=st.sampled_from([WorkerLost("killed"), StepTimeout("too slow"), None]), num_failures=st.integers(0, 2))
    def lose_rank(self, error: WorkerLost | StepTimeout | None, num_failures: int) -> None:
        self.source.failures = [LoadError("not yet")] * num_failures
        running = [uid for uid in self.live if uid not in self.waiting]
        lives = len(self.source.groups)
        self.source.group.lose(error or WorkerLost("killed while idle"))
        self.run()
        assert len(self.source.groups) == lives + 1
        assert all(self.sink.ends[uid] for uid in running)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert self.engine.check_books() == []
        assert self.source.violations == []
        assert self.sink.violations == []
        assert self.engine.is_serving
        for uid, wanted in self.requests.items():
            tokens = tuple(self.sink.tokens[uid])
            assert tokens == true_stream(wanted)[: len(tokens)]
            assert len(self.sink.ends[uid]) <= 1
            if tokens:
                usage = self.sink.usage[uid]
                assert usage.completion == len(tokens) == usage.accepted + usage.rounds - usage.trimmed
                assert usage.accepted <= usage.admitted <= usage.drafted
                assert usage.cached in (0, usage.prompt - 1)
                assert wanted.max_drafts is None or usage.drafted <= wanted.max_drafts * usage.rounds

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            while self.source.group.is_waiting:
                self.source.group.let_go()
                self.run()
            self.check_ends()
            statistics = self.engine.statistics()
            assert (statistics.running, statistics.waiting, statistics.slots_used) == (0, 0, 0)
            assert all(use.used == 0 for rank in statistics.dp_ranks for use in rank.pages)
            assert self.source.group.tenants == []
            self.run(self.engine.stop(drain_s=0))
        self.loop.close()

    def check_ends(self) -> None:
        for uid, wanted in self.requests.items():
            if uid in self.aborted:
                assert self.sink.ends[uid] == []
                continue
            end, tokens, stream = self.sink.end_of(uid), tuple(self.sink.tokens[uid]), true_stream(wanted)
            if end == TIME_LIMIT:
                assert wanted.stopping.time_limit_s is not None
                assert self.now_s >= self.submitted_s[uid] + wanted.stopping.time_limit_s
                assert len(tokens) < len(stream)
            elif isinstance(end, Finish):
                assert tokens == stream
                by_token = {0: FinishReason.EOS, 7: FinishReason.STOP_TOKEN, 8: FinishReason.STOP_TOKEN}
                ends_by_token = tokens[-1] in (*wanted.stopping.eos_token_ids, *wanted.stopping.stop_token_ids)
                assert end.reason == (by_token[tokens[-1]] if ends_by_token else FinishReason.LENGTH)
            elif end == "stop string":
                assert len(tokens) >= self.sink.stop_after[uid]
            else:
                assert isinstance(end, Unavailable)


TestSchedules = Schedules.TestCase
# A failure is told as it was drawn, within seconds. Shrinking one takes minutes; add Phase.shrink to have it.
TestSchedules.settings = settings(stateful_step_count=30, phases=(Phase.explicit, Phase.reuse, Phase.generate))
