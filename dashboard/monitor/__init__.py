"""``kakeya top``: the fleet in a terminal. Pictures and frames are pure; ``terminal`` and ``screen`` do the input and output."""
