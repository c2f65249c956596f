"""What all attacks share: the contract, the victim, results, loops over survivors, gradients.

An attack file imports from here; nothing here imports an attack. Start with `attack.py`.
"""
