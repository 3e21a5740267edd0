"""The lines above the panels: is the bus heard, how much was reused, what moves, how long answers took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.text import Text

from dashboard.fleet_view import BusState, NodeStatus
from dashboard.monitor.controls import Controls
from dashboard.monitor.panels import BAD, BUSY, FAINT, GOOD, SOURCES, WARNING
from dashboard.monitor.picture import Picture
from dashboard.monitor.text import Glyphs, age, bar, chart, clean, count, duration, fit, percent, rate, ratio, size, width_of
from dashboard.series import Bucket

CHART_CELLS: Final = 16
RECENT_BUCKETS: Final = 12
"""What "now" means for rates: one minute."""
SPACE: Final = "   "
Part = tuple[str, str]
"""(text, style)"""


def lines(picture: Picture, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly ``height`` lines, 3 or 4, of exactly ``width`` cells."""
    made = [
        _state(picture, controls, width, glyphs),
        _flow(_tokens(picture, glyphs), width, glyphs),
        _flow(_movement(picture, glyphs), width, glyphs),
        _flow(_times(picture), width, glyphs),
    ]
    return made[:height]


def _flow(items: Sequence[Sequence[Part]], width: int, glyphs: Glyphs, style: str = "") -> Text:
    """As many items as fit, whole ones."""
    line = Text(" ", style=style)
    used = 1
    for index, item in enumerate(items):
        parts = [(clean(text, glyphs), part_style) for text, part_style in item]
        cells = sum(width_of(text) for text, _ in parts) + (len(SPACE) if index else 0)
        if used + cells > width:
            continue
        line.append(SPACE if index else "")
        for text, part_style in parts:
            line.append(text, style=part_style or None)
        used += cells
    return line.append(" " * max(0, width - used))


def _state(picture: Picture, controls: Controls, width: int, glyphs: Glyphs) -> Text:
    bus = picture.bus
    title = [("kakeya top", "bold")]
    if bus.state is BusState.SILENT:
        text = f" kakeya top   BUS SILENT for {age(bus.silent_s)}: below is what was known last"
        return Text(fit(_with_marks(text, controls, glyphs), width, glyphs), style="bold reverse red")
    if bus.state is BusState.WAITING:
        text = " kakeya top   WAITING for the bus: nothing was heard yet"
        return Text(fit(_with_marks(text, controls, glyphs), width, glyphs), style="bold reverse yellow")
    online = sum(node.status is NodeStatus.ONLINE for node in picture.nodes)
    items: list[list[Part]] = [title, [("bus ", FAINT), ("live", GOOD)]]
    if bus.back_after_s > 0:
        items.append([(f"BUS IS BACK after {age(bus.back_after_s)}", "bold green")])
    if controls.paused:
        items.append([("PAUSED", "bold reverse yellow")])
    items.append([(f"{online} online", GOOD if online else WARNING)])
    stale = len(picture.nodes) - online
    if stale:
        items.append([(f"{stale} stale", WARNING)])
    if picture.unheard:
        items.append([(f"{len(picture.unheard)} not heard", WARNING)])
    if picture.refusals:
        items.append([(f"{count(picture.refusals)} refused", BAD)])
    items.append([(f"{len(picture.jobs_active)} jobs", BUSY if picture.jobs_active else FAINT)])
    if controls.filtered:
        items.append([("filter ", FAINT), (_filter(controls), BUSY)])
    if picture.lost:
        items.append([(f"{count(picture.lost)} messages lost", WARNING)])
    return _flow(items, width, glyphs)


def _with_marks(text: str, controls: Controls, glyphs: Glyphs) -> str:
    marks = ["PAUSED"] if controls.paused else []
    marks += [f"filter {clean(_filter(controls), glyphs)}"] if controls.filtered else []
    return SPACE.join([text, *marks])


def _filter(controls: Controls) -> str:
    return " ".join([*(f"--node {pattern}" for pattern in controls.nodes), controls.filter]).strip()


def _tokens(picture: Picture, glyphs: Glyphs) -> list[list[Part]]:
    totals = picture.totals
    reused, computed = totals.get("prefill.tokens_reused", 0), totals.get("prefill.tokens_computed", 0)
    recent = _recent(picture)
    now = recent("tokens_reused"), recent("tokens_computed")
    own, fleet, cold = (count(totals.get(f"prefill.{name}", 0)) for name in ("local_hits", "remote_hits", "misses"))
    shares = [_share(bucket) for bucket in _last(picture, CHART_CELLS)]
    items: list[list[Part]] = [
        [("hit rate ", FAINT), (percent(ratio(reused, reused + computed)) if reused + computed else "-", "bold")],
        [("last minute ", FAINT), (percent(ratio(now[0], sum(now))) if sum(now) else "-", "")],
        [("reused ", FAINT), (count(reused), GOOD), (" computed ", FAINT), (count(computed), WARNING), (" tok", FAINT)],
        [("prompts: own ", FAINT), (own, ""), (" fleet ", FAINT), (fleet, ""), (" cold ", FAINT), (cold, "")],
        [(chart(shares, glyphs, top=1.0), BUSY)],
        [("generated ", FAINT), (count(totals.get("prefill.tokens_generated", 0)), "")],
        [("fallbacks ", FAINT), (count(totals.get("prefill.fallbacks", 0)), "")],
    ]
    return items


def _movement(picture: Picture, glyphs: Glyphs) -> list[list[Part]]:
    used = sum(node.figure("cache", "bytes_used") for node in picture.nodes)
    limit = sum(node.figure("cache", "max_bytes") for node in picture.nodes)
    recent = _recent(picture)
    seconds = RECENT_BUCKETS * picture.step_s
    moved = [bucket.figures.get("bytes_in", 0.0) if bucket is not None else None for bucket in _last(picture, CHART_CELLS)]
    decoded = recent("decode_count")
    return [
        [("cache ", FAINT), (bar(ratio(used, limit), 10, glyphs), BUSY), (f" {size(used)} of {size(limit)}", "")],
        [("moved in ", FAINT), (f"{size(recent('bytes_in') / seconds)}/s", "")],
        [("decode ", FAINT), (rate(recent("decode_tps_sum") / decoded) if decoded else "-", ""), (" tok/s", FAINT)],
        [(chart(moved, glyphs), BUSY)],
        [("evicted ", FAINT), (count(picture.totals.get("cache.evictions", 0)), "")],
        [("lookups served ", FAINT), (count(picture.totals.get("cache.lookup_hits", 0)), "")],
    ]


def _times(picture: Picture) -> list[list[Part]]:
    known = [(source, *picture.ttft_s[source]) for source in sorted(picture.ttft_s)]
    items: list[list[Part]] = [[("mean time to first token: ", FAINT), ("" if known else "-", "")]]
    for source, total_s, number in known:
        if number:
            mean = duration(total_s / number)
            items.append([(f"{SOURCES.get(source, source)} ", FAINT), (mean, ""), (f" ({number})", FAINT)])
    return items


def _recent(picture: Picture) -> Callable[[str], float]:
    buckets = [bucket for bucket in _last(picture, RECENT_BUCKETS) if bucket is not None]
    return lambda name: sum(bucket.figures.get(name, 0.0) for bucket in buckets)


def _last(picture: Picture, length: int) -> list[Bucket | None]:
    """The last buckets, the newest one last; None where nothing was heard."""
    newest = int(picture.now // picture.step_s)
    known = {round(bucket.start / picture.step_s): bucket for bucket in picture.buckets[-length:]}
    return [known.get(newest - length + 1 + position) for position in range(length)]


def _share(bucket: Bucket | None) -> float | None:
    reused = bucket.figures.get("tokens_reused", 0.0) if bucket is not None else 0.0
    computed = bucket.figures.get("tokens_computed", 0.0) if bucket is not None else 0.0
    return ratio(reused, reused + computed) if reused + computed else None
