"""Coverage-guided fuzzing (``make fuzz``): inputs that reach new code are kept and mutated further.

``harnesses`` take one input each, ``guided`` runs one harness under atheris, and ``__main__`` runs all harnesses and checks their findings.
"""
