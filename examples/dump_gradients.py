#!/usr/bin/env python3
"""Writes gradients for `headroom inspect`: one backward pass of a bigram language model.

    python3 examples/dump_gradients.py /tmp/lm.npz && ./run inspect /tmp/lm.npz

The loss is the mean cross-entropy over 65,536 tokens. Its gradient for each word that is not the target is its
probability / 65536, which underflows in FP16 for rare words. Needs NumPy.
"""
import sys

import numpy as np

VOCABULARY, WIDTH, TOKENS = 1024, 16, 65536

rng = np.random.default_rng(1)
embedding = rng.normal(0, 1, (VOCABULARY, WIDTH)).astype(np.float32)
output = rng.normal(0, 0.5, (WIDTH, VOCABULARY)).astype(np.float32)
rank = np.arange(1, VOCABULARY + 1)
tokens = rng.choice(VOCABULARY, TOKENS + 1, p=rank**-1.2 / np.sum(rank**-1.2))

hidden = embedding[tokens[:-1]]
logits = hidden @ output
logits -= logits.max(axis=1, keepdims=True)
probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

d_logits = probability
d_logits[np.arange(TOKENS), tokens[1:]] -= 1
d_logits /= TOKENS
d_hidden = d_logits @ output.T
d_embedding = np.zeros_like(embedding)
np.add.at(d_embedding, tokens[:-1], d_hidden)

np.savez(sys.argv[1], **{"logits": d_logits, "hidden": d_hidden, "output.weight": hidden.T @ d_logits,
                         "embedding.weight": d_embedding})
