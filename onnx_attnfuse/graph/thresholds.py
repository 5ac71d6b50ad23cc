"""Numbers from which on a mask masks, absorbs a score, or is rounded: each threshold of masking once, with its reason.

0 ── ±900 ─── -1000 ──── -2e3 ────────── -2e4 ────────── -1e9 ────────── -1e12 ────────── -1e30 ───── -3.4e38
     scores   masks      float32 rounds  float16 absorbs float32 rounds  float32 absorbs  masks any   lowest
                                                         all             ordinary scores  score       float32
"""

from __future__ import annotations

ORDINARY = 900.0
"""Under `bounded-scores` scores, and summands of them that are no mask, are at most this far from 0."""
MASKS = -1e3
"""Under `large-fills` and `bounded-scores` a number masks from here down."""
MASKS_ANY_SCORE = -1e30
"""Without these a number masks from here down: no score of any model comes near."""
MASKS_APART = 2e3
"""Two masked keys whose numbers differ by this much do not share a row's weight: ordinary scores lie closer together."""

ABSORBS = -1e12
"""Added in float32, a number from here down leaves nothing of an ordinary score: floats lie 65536 apart there."""
ABSORBS_HALF = -2e4
"""Added in float16, a number from here down leaves nothing of an ordinary score."""
LEVELS_HALF = -8192.0
"""Added in float16, a number from here down leaves nothing of a score between -4 and 4: floats lie 8 apart there."""
ROUNDS_HALF = -64.0
"""Added in float16, a number from here down rounds an ordinary score visibly: floats lie 1/16 apart there."""
ROUNDS = -2e3
"""Added in float32, a number from here down rounds an ordinary score visibly: by more than verification tolerates."""
ROUNDS_ALL = -1e9
"""Added in float32, a number from here down leaves nothing of scores between -32 and 32: floats lie 64 apart there."""
ROUNDS_DOUBLE = -1e5
"""Added in float64, a number from here down rounds an ordinary score by more than gradients may differ: by 1e-11."""
ROUNDS_ALL_DOUBLE = -5e17
"""Added in float64, a number from here down leaves nothing of scores between -32 and 32: floats lie 64 apart there."""

LOWEST_FLOAT32 = -3.4028234663852886e38
LARGEST_FLOAT16 = 65504.0
NEARLY_LOWEST = -3.4e38
"""From here down a number counts as the lowest of float32, however its decimals were written."""
ABOVE_NEARLY_LOWEST = -3e38
"""From here up a number is certainly larger than the lowest of float32, whatever scores are added to either."""

LEAST_EXPONENT = -50.0
"""Numbers from here up, and ordinary scores besides, leave an exponential something."""
NO_EXPONENTIAL = -104.0
"""Below this the exponential of a float32 is 0."""

LEAST_SUM = 1e-30
"""A sum of weights from here up has all its digits in float32."""
SOFTENS = 1e-8
"""The largest number that may keep such a sum from being 0; under `kept-weights` a sum is ten thousand times as large."""
BESIDE_SOFTENING = 1e4
