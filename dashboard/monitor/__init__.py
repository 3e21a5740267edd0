"""``kakeya top``: the fleet in a terminal. Frames are pure values; ``terminal`` and ``screen`` do input and output."""
