"""How benchmarks judge their goals."""

from __future__ import annotations

from bench import backlog, starts, takeover


def test_takeover_counts_the_median_after_kills_and_the_longest_round_after_orderly_stops() -> None:
    judged = takeover.judge({"kill": [1.0, 1.9, 9.0], "hand-over": [0.5, 0.6, 1.1]})
    assert (judged["kill"]["s"], judged["kill"]["reached"]) == (1.9, True)
    assert (judged["hand-over"]["s"], judged["hand-over"]["reached"]) == (1.1, False)
    judged = takeover.judge({"kill": [1.0, 2.1, 2.2], "hand-over": [1.0]})
    assert [each["reached"] for each in judged.values()] == [False, True]
    page = takeover.page({"messages": 5, "body_bytes": 1024, "judged": judged, "machine": "slow"})
    assert "| kill | 2 (p50) | 2.1 | 1.0, 2.1, 2.2 | **no** |" in page


def test_start_with_a_deep_queue_reaches_its_goal_only_with_time_and_both_memories() -> None:
    good = {"messages": 1_000_000, "kill_to_serving_s": 5.0, "rss_mb": 350.0, "rss_after_start_mb": 350.0}
    assert all(backlog.judge(good).values())
    for figure in backlog.GOALS:
        missed = {**good, figure: good[figure] + 0.1}
        assert [name for name, reached in backlog.judge(missed).items() if not reached] == [figure]
        assert f"| {figure} | {missed[figure]} | {good[figure]:g} | **no** |" in backlog.page(missed)


def test_median_of_starts_counts() -> None:
    judged = starts.judge({"bascule up": [14.0, 15.1, 15.2], "broker": [1.0, 2.9, 8.0]})
    assert [(each["p50_s"], each["reached"]) for each in judged.values()] == [(15.1, False), (2.9, True)]
    page = starts.page({"judged": judged, "machine": "slow"})
    assert "| bascule up | 15 | 15.1 | 14.0, 15.1, 15.2 | **no** |" in page
