"""The parts of a Llama-like layer.

Read in this order: decoder_layer, grouped_attention, latent_attention, gated_mlp, mixture, routing, normed_product.
"""
