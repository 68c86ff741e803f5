"""`python -m stages.tracking.initialise`: create MLflow's database, once, before any stage.

Nothing depends on it: who comes first creates the schema, under a lock. It takes two seconds of CPU
that are better spent at set-up than beside a training.
"""

import sys

from stages.tracking.store import connect, in_words, store_from_environment


def main() -> int:
    store = store_from_environment()
    try:
        connect(store)
    except Exception as error:  # one sentence, whatever the store throws
        print(
            f"tracking: {store.name} is not ready: {in_words(error)}; training is not affected, "
            "`make sync` sends its runs later",
            file=sys.stderr,
        )
        return 0
    print(f"tracking: {store.name} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
