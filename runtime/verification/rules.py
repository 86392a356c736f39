"""What the policies in force ask of each sequence. Pure; knows no cost and no past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.verification.planner import Aim
from runtime.verification.policy import Dynamic, Fixed, Off, Policy, PolicyState
from runtime.verification.speculation import Load, Traits


@dataclass(frozen=True, slots=True)
class Rule:
    """What one policy asks: drafts per round at most, how many of them whatever they cost, and what for where the
    number between the two is to be found."""

    cap: int
    forced: int
    aim: Aim | None = None


def rule_of(policy: Policy, gamma_max: int, *, fallback: int | None) -> Rule:
    """fallback: drafts per round of a dynamic policy that cannot be planned; None where it can."""
    match policy:
        case Off():
            return Rule(0, 0)
        case Fixed(gamma=gamma):
            return Rule(min(gamma, gamma_max), min(gamma, gamma_max))
        case Dynamic():
            most = gamma_max if policy.gamma_max is None else min(policy.gamma_max, gamma_max)
            least = min(policy.gamma_min, most)
            if fallback is not None:
                fixed = min(max(fallback, least), most)
                return Rule(fixed, fixed)
            return Rule(most, least, Aim(policy.itl_limit_ms, policy.min_gain, policy.min_survival))


@dataclass(frozen=True, slots=True)
class Rules:
    """The rule of each priority, and that of all others."""

    others: Rule
    by_priority: dict[int, Rule]

    @classmethod
    def of(cls, state: PolicyState, gamma_max: int, *, fallback: int | None) -> Rules:
        return cls(
            rule_of(state.policy, gamma_max, fallback=fallback),
            {priority: rule_of(policy, gamma_max, fallback=fallback) for priority, policy in state.classes},
        )

    def of_request(self, traits: Traits) -> Rule:
        """A rule under the request's own limit."""
        rule = self.by_priority.get(traits.priority, self.others)
        limit = traits.max_drafts
        if limit is None or limit >= rule.cap:
            return rule
        return Rule(limit, min(rule.forced, limit), rule.aim)

    def in_force(self, loads: Sequence[Load]) -> list[Rule]:
        """Those that some sequence is under, each once; that of all others where there is no sequence."""
        return list({rule: None for load in loads for rule in self.of_load(load).values()}) or [self.others]

    def of_load(self, load: Load) -> dict[Traits, Rule]:
        """Of all sequences of a load by what they have in common: few rules for many sequences."""
        return {one: self.of_request(one) for one in {*load.traits, *load.entering_traits}}


def common_aim(rules: Sequence[Rule]) -> Aim | None:
    """What a step is for that sequences under several rules share: the strictest limit, the least gain and survival
    that any asks for. None where no number is to be found."""
    aims = [rule.aim for rule in rules if rule.aim is not None]
    if not aims:
        return None
    limits = [aim.itl_limit_ms for aim in aims if aim.itl_limit_ms is not None]
    return Aim(
        itl_limit_ms=min(limits) if limits else None,
        min_gain=min(aim.min_gain for aim in aims),
        min_survival=min(aim.min_survival for aim in aims),
    )
