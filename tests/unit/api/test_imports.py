import subprocess
import sys


def test_the_api_process_imports_neither_torch_nor_transformers_nor_trace_exporters() -> None:
    # redis-py itself imports OpenTelemetry's metrics if they are installed.
    code = (
        "import sys, loraserve.api.app, loraserve.cli.serve.control_start, loraserve.cli.serve.server_start\n"
        "heavy = {'torch', 'transformers', 'triton', 'safetensors', 'peft'}\n"
        "heavy |= {'opentelemetry.sdk.trace', 'opentelemetry.exporter'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    path = f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
