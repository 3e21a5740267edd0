"""``kakeya doctor``: looks for everything that is known to go wrong, and says how to mend it.

Each module looks at one subject and returns findings; nothing is changed, and no key is shown. What is judged (a speed, an
error of the network, two sets of figures) is judged by pure functions, so that each fault can be planted in a test.
"""

from __future__ import annotations

from daemons.doctor.examine import examine

__all__ = ["examine"]
