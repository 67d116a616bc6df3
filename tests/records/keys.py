"""List the keys of a record that the table in docs/measuring.md explains."""
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / 'docs/measuring.md').read_text()
TABLE = PAGE.partition('| key | meaning |\n|---|---|\n')[2].partition('\n\n')[0]
KEYS = [key for row in TABLE.splitlines() for key in re.findall('`([a-z0-9_]+)`', row.split('|')[1])]
