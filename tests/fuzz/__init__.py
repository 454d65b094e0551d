"""Coverage-guided fuzzing (``make fuzz``): inputs that reach new code are kept and changed further.

``harnesses`` take one input each, ``guided`` runs one of them under atheris, ``__main__`` runs them all and judges what they find.
"""
