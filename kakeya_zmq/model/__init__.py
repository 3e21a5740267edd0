"""The model side: cache layout, sink+window cache, BLAS choice, engine. The only folder that imports mlx and mlx_lm."""
