"""The report's JSON Schema, as docs/benchmarks/bench.schema.json holds it. To write it anew after a change:

python -m runtime.bench.schema > docs/benchmarks/bench.schema.json
"""

from __future__ import annotations

import json

from runtime.bench.document import SCHEMA_VERSION, Report


def schema_text() -> str:
    schema = Report.model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"Report of outrider bench, version {SCHEMA_VERSION}"
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
