"""Strata: an end for every rhythm, and one for every other role."""

import pytest

from marconi.policy.forecast.forecast import NUM_LEVELS, NUM_RHYTHMS, NUM_STRATA, SHAPE, Role, stratum_of


def test_every_rhythm_of_an_end_has_its_stratum_and_every_other_role_one() -> None:
    of_ends = [stratum_of(Role.END, rhythm) for rhythm in range(NUM_RHYTHMS)]
    others = [stratum_of(role, 0) for role in (Role.PASSED, Role.WAYPOINT, Role.BRANCH)]
    assert of_ends + others == list(range(NUM_STRATA))


@pytest.mark.parametrize("rhythm", range(NUM_RHYTHMS))
@pytest.mark.parametrize("role", list(Role))
def test_the_group_of_a_stratum_is_its_role(role: Role, rhythm: int) -> None:
    assert SHAPE.group_of[stratum_of(role, rhythm)] == role


@pytest.mark.parametrize("role", [Role.PASSED, Role.WAYPOINT, Role.BRANCH])
def test_the_rhythm_is_of_no_account_on_the_way(role: Role) -> None:
    assert len({stratum_of(role, rhythm) for rhythm in range(NUM_RHYTHMS)}) == 1


def test_a_prior_stands_for_every_role_and_the_factors_are_those_of_the_traits() -> None:
    assert len(SHAPE.group_priors) == len(Role)
    assert SHAPE.num_levels == NUM_LEVELS
    assert SHAPE.group_priors[Role.BRANCH] > SHAPE.group_priors[Role.END] > SHAPE.group_priors[Role.PASSED]
