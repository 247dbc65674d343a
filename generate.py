"""Generate text: ``python generate.py checkpoint=RUN/last.ckpt prompt="Once upon a time"``."""

import sys

try:
    from selmodel.cli import main
    from selmodel.inference.run import generate_text
except KeyboardInterrupt:  # they take seconds
    sys.exit(130)

if __name__ == "__main__":
    main(generate_text, "generate", literal=("prompt",))
