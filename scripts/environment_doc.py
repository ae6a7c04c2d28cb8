"""Write docs/environment.md from the code of the environment: python scripts/environment_doc.py > docs/environment.md"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields

from envs.action import MAX_STEPS, RADIUS, RESOLUTION
from envs.lanes import INFO_KEYS, REWARD_LIMIT
from envs.objective import COST_TERMS
from envs.observation_vector import COMPONENTS, DIM, VALIDITY
from envs.task import DOMAIN, FIXED, LOADS, Randomisation

TERMS = {
    "tokens": "prompt and completion tokens of misses",
    "refresh": "the same of background refreshes",
    "latency": "sum of all latencies x value of a second",
    "memory": "`cache_size` x the workload's own hours x price of a GiB-hour",
    "staleness": "expected stale answers x penalty",
    "slo": "seconds by which P99 exceeds its objective x price",
    "change": "grid steps by which the knobs were moved (root of the sum of squares) x price",
}

INFO = {
    "requests": "requests in the window; both caches saw the same",
    "cost": "our cost, US dollars per 1,000 requests: each term below, and `total`; empty without requests",
    "dollars": "our cost of the window, US dollars; 0 without requests",
    "knobs": "the knobs that were in force: `cache_size` (bytes), `ttl` (seconds), `warmup_ratio`",
    "hit_ratio": "hits over requests; absent without requests",
    "reference_cost": "the reference's cost, like `cost`",
    "reference_dollars": "the reference's, like `dollars`",
    "reference_knobs": "the reference's, like `knobs`",
    "reference_hit_ratio": "the reference's, like `hit_ratio`",
}


def page() -> str:
    """Return the page."""
    return "\n".join([*HEAD, *_observation(), *_action(), *_reward(), *END, *_randomisation(), *VECTOR])


def _text(text: str) -> list[str]:
    """Return the lines of an indented text, and an empty one."""
    return [*inspect.cleandoc(text).splitlines(), ""]


HEAD = _text(
    """
    # The environment

    Written by `python scripts/environment_doc.py > docs/environment.md` from the code in `envs/`.

    `CacheTuning-v0` (`envs/cache_env.py`) tunes a simulated cache on a trace. A step is one decision interval. A second cache,
    tuned
    by the reference policy, runs on the very same requests.

    ```python
    import envs, gymnasium

    env = gymnasium.make("CacheTuning-v0")  # or trace=..., config=SimConfig(...), interval=60.0
    observation, info = env.reset(seed=0)  # one interval on the initial knobs, from empty caches
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    ```
    """
)

END = _text(
    """
    ## End of an episode

    `truncated` after `episode_length` steps or at the trace's end. `terminated` is never true: a cache has no final state,
    serving
    goes on beyond the last interval that is simulated, so a learner must bootstrap the value there (Pardo et al., ICML'18).
    """
)

VECTOR = _text(
    """
    ## Many caches at once

    `CacheTuningVecEnv` (`envs/vec_env.py`) is a native vector environment of stable-baselines3: one call simulates all lanes, and
    observation, prices, limits and rewards are computed on arrays. The single environment is one lane of the same code.

    ```python
    from envs.cache_env import make_task
    from envs.vec_env import CacheTuningVecEnv
    from stable_baselines3 import PPO

    PPO("MlpPolicy", CacheTuningVecEnv(make_task(reward="relative"), num_envs=32)).learn(100_000)
    ```

    - After `seed(s)` lane e plays what the single environment plays after `reset(seed=s + e)`, episode after episode, to the last
      bit, however many lanes there are.
    - A lane whose episode is over starts the next at once; its info holds `terminal_observation` and `TimeLimit.truncated`.
    - Knob spaces, prices and intervals may differ between lanes; the number of grid steps may not, and that is checked.
    - `info` is a mapping that is filled when it is read. Rewards are float64.
    - `get_attr` knows `observation` (the whole one, for policies that need more than the vector), `knobs` and `space`;
      `step_knobs`
      runs an interval under given knobs.
    """
)


def _observation() -> list[str]:
    lines = _text(
        f"""
        ## Observation

        `Box(float32, ({DIM},))`: {len(COMPONENTS)} components, then {len(VALIDITY)} validity bits (0 or 1), one for each
        component that
        is derived from a signal. Where a signal is missing, negative, not finite or absurd (1e15 and more), the component is 0
        and its
        bit is 0. The vector is never NaN and never leaves the range. `x` is the raw value in the unit given; the tuner builds
        the same
        vector from a live gateway's metrics.

        | # | component | unit of x | normalisation | range | bit | x |
        |--:|---|---|---|---|--:|---|
        """
    )[:-1]
    for index, component in enumerate(COMPONENTS):
        bit = str(len(COMPONENTS) + VALIDITY.index(component.name)) if component.signal else "-"
        lines.append(
            f"| {index} | `{component.name}` | {component.unit or '-'} | `{component.normalisation}` | "
            f"{component.low:g} to {component.high:g} | {bit} | {component.help} |"
        )
    return [*lines, ""]


def _action() -> list[str]:
    return _text(
        f"""
        ## Action

        `Box(-1, 1, (3,), float32)`: size, TTL, warm-up ratio as a residual around the anchor, the optimum of the smoothed ghost
        curve under the prices. 1 stands for {_steps(RADIUS)} grid steps; residuals are rounded to {RESOLUTION:g} of a step, and
        0 is the anchor itself. `actions=ActionMap(radius=...)` reaches farther or leaves a knob alone (0);
        `ActionMap("absolute")` makes an action a position on the whole grid, for ablation. Without a trustworthy curve the
        knobs are held. One interval moves the knobs by at most {_steps(MAX_STEPS)} grid steps, and never beyond the bounds of
        the knob space. An action that is not three finite numbers is refused.
        """
    )


def _reward() -> list[str]:
    text = _text(
        f"""
        ## Reward and info

        The reward is the reference's cost of the window less ours, in US dollars per 1,000 requests, exactly:
        `info["reference_cost"]["total"] - info["cost"]["total"]`, and 0 for a window without requests. The reference is `curve`
        (always goes to the anchor of its own cache), `hold` (the initial knobs for ever), any function of its observation, or
        whatever acts as the learner does (`act(vectors)`).

        `reward="relative"`, which training uses, divides the dollars saved in the window by the reference's mean cost of an
        interval and clips to {REWARD_LIMIT:g}: scenarios of any price weigh the same.

        A `Task` with `taped=True` computes a trace's ghost once and keeps its windows: training is several times faster.
        `hidden=(...)` takes components of the observation away, by name or by group (`curve`, `foresight`).
        """
    )
    terms = [f"| `{name}` | {TERMS[name]} |" for name in COST_TERMS]
    keys = [f"| `{name}` | {INFO[name]} |" for name in INFO_KEYS]
    note = "Both caches share one ghost: it depends on the requests and not on the knobs."
    return [
        *text, "| cost term | US dollars per 1,000 requests |", "|---|---|", *terms, "",
        "| key of `info` | meaning |", "|---|---|", *keys, "", note, "",
    ]  # fmt: skip


def _randomisation() -> list[str]:
    meanings = _attributes(Randomisation)
    rows = [
        f"| `{item.name}` | {_shown(getattr(DOMAIN, item.name))} | {_shown(getattr(Randomisation(), item.name))} | "
        f"{_shown(getattr(FIXED, item.name))} | {meanings[item.name]} |"
        for item in fields(Randomisation)
    ]
    text = _text(
        f"""
        ## Domain randomisation

        What differs between episodes: `randomise=` takes a `Randomisation`; `CacheTuning-v0` uses `DOMAIN` unless told
        otherwise, and
        `FIXED` is for evaluation. A factor f multiplies by a number drawn log-uniformly from 1/f to f; 1 is none. A trace is
        replayed
        at one of {LOADS} speeds.

        | field | `DOMAIN` | `Randomisation()` | `FIXED` | what is drawn |
        |---|--:|--:|--:|---|
        """
    )[:-1]
    return [*text, *rows, "", "Equal seeds give equal episodes, to the last bit, on one machine and one set of versions.", ""]


def _steps(values: tuple[float, float, float]) -> str:
    return f"{values[0]:g}, {values[1]:g} and {values[2]:g}"


def _shown(value: float | bool) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:g}"


def _attributes(described: type) -> dict[str, str]:
    """Return the attributes' descriptions in a class's docstring."""
    text = (inspect.getdoc(described) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for line in text.splitlines():
        start = re.match(r" {4}(\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        else:
            found[name] += " " + line.strip()
    return {name: re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("``", "`") for name, text in found.items()}


if __name__ == "__main__":
    sys.stdout.write(page())
