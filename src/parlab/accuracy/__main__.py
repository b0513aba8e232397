"""`python -m parlab.accuracy` prints how far estimates are from measured runs."""

from parlab.accuracy.report import report

if __name__ == "__main__":
    print("\n".join(report()))
