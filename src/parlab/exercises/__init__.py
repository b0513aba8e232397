"""Exercises that know the usual mistakes: `records` says what one is, a file a topic holds them.

To add one: write the reference solution, with "# given" behind the lines that the stub keeps, its
answer by another route, random arguments and its misconceptions in a topic file, and list it in
EXERCISES there; give each misconception a bug in tests/exercise_bugs.txt; and write the stubs anew
by `python -m parlab.exercises --force exercises/student.py`.
"""
