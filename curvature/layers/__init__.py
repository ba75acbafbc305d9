"""Layers whose derivatives up to the second are fused: linear maps, norms, activations, and the loss behind the head.

Autograd composes a second derivative from many small operations, each a pass through memory. The layers here compute
first and second derivatives of a layer in one pass, from closed forms, and leave out what nobody reads. They stand in
for a model's own modules while the streamed product runs (`curvature.layers.substitutes`), where they are found to
compute the same function.
"""
