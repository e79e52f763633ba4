/* The native kernel: arithmetic on tensors in raw memory, for Python, on the stable ABI.
 *
 * Contract. Addresses come in as Python integers (the stable ABI of Python 3.10 has no buffers), need not be aligned, and
 * are trusted to be readable; everything else is checked and refused with ValueError. The lock of the interpreter is
 * released around large work only, because handing it over costs more than a small tensor does. twin.py has the same
 * functions with the same results. The arithmetic on one tensor is in _moments.h and _peak.h, on two in
 * _pairs.h and _glance.h.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_glance.h"
#include "_moments.h"
#include "_pairs.h"
#include "_peak.h"

#define ROW_WIDTH 3 /* address, number of elements, dtype code */
#define PAIR_WIDTH 5 /* two addresses, number of elements, two dtype codes: of the baseline, of the candidate */
#define GREATEST_COUNT (INT64_C(1) << 58) /* no memory holds more; below it no count times size overflows */
#define GIL_BYTES 65536

static int read_integers(PyObject *const *args, Py_ssize_t given, int wanted, long long *numbers) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %d integers, got %zd arguments", wanted, given);
        return 0;
    }
    for (int i = 0; i < wanted; i++) {
        numbers[i] = PyLong_AsLongLong(args[i]);
        if (numbers[i] != -1 || !PyErr_Occurred()) continue;
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) PyErr_SetString(PyExc_ValueError, "integer out of range");
        return 0;
    }
    return 1;
}

/* Whether the row is sound; if not, a ValueError is set whose text names the row, unless it is the only one. */
static int check_row(const int64_t *row, Py_ssize_t number) {
    const int known = row[2] >= 0 && row[2] < DTYPES, possible = row[1] >= 0 && row[1] <= GREATEST_COUNT;
    if (known && possible && (row[1] == 0 || row[0] > 0)) return 1;
    char where[40] = "";
    if (number >= 0) PyOS_snprintf(where, sizeof where, "row %lld: ", (long long)number);
    if (!known)
        PyErr_Format(PyExc_ValueError, "%sunknown dtype code: %lld", where, (long long)row[2]);
    else if (!possible)
        PyErr_Format(PyExc_ValueError, "%simpossible number of elements: %lld", where, (long long)row[1]);
    else
        PyErr_Format(PyExc_ValueError, "%snull address for %lld elements", where, (long long)row[1]);
    return 0;
}

static int64_t row_bytes(const int64_t *row) {
    const Kind *kind = &kinds[row[2]];
    return row[1] * kind->parts * kind->value_size;
}

static Figures summarize_row(const int64_t *row) {
    return summarize_exactly(&kinds[row[2]], (const void *)(intptr_t)row[0], row[1]);
}

/* Made by hand, since Py_BuildValue takes as long as a small tensor does. */
static PyObject *tuple_of(const Figures *figures) {
    PyObject *tuple = PyTuple_New(6);
    if (!tuple) return NULL;
    PyObject *numbers[6] = {
        PyFloat_FromDouble(figures->max),  PyFloat_FromDouble(figures->min),    PyFloat_FromDouble(figures->mean),
        PyFloat_FromDouble(figures->norm), PyLong_FromLongLong(figures->nan), PyLong_FromLongLong(figures->inf),
    };
    int complete = 1;
    for (int i = 0; i < 6; i++) {
        complete = complete && numbers[i];
        PyTuple_SetItem(tuple, i, numbers[i]);
    }
    if (complete) return tuple;
    Py_DECREF(tuple);
    return NULL;
}

static PyObject *native_summarize(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    long long numbers[ROW_WIDTH];
    Figures figures;
    (void)module;
    if (!read_integers(args, given, ROW_WIDTH, numbers)) return NULL;
    const int64_t row[ROW_WIDTH] = {numbers[0], numbers[1], numbers[2]};
    if (!check_row(row, -1)) return NULL;
    if (row_bytes(row) < GIL_BYTES) {
        figures = summarize_row(row);
    } else {
        Py_BEGIN_ALLOW_THREADS
        figures = summarize_row(row);
        Py_END_ALLOW_THREADS
    }
    return tuple_of(&figures);
}

static PyObject *native_summarize_many(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    long long numbers[3];
    (void)module;
    if (!read_integers(args, given, 3, numbers)) return NULL;
    const unsigned char *rows = (const unsigned char *)(intptr_t)numbers[0];
    unsigned char *out = (unsigned char *)(intptr_t)numbers[2];
    const long long n = numbers[1];
    int64_t row[ROW_WIDTH];
    if (n < 0) return PyErr_Format(PyExc_ValueError, "negative number of rows: %lld", n);
    if (n && (numbers[0] <= 0 || numbers[2] <= 0)) return PyErr_Format(PyExc_ValueError, "null address");
    for (long long i = 0; i < n; i++) { /* all of them before any: a batch is done whole or not at all */
        memcpy(row, rows + i * (long long)sizeof row, sizeof row);
        if (!check_row(row, (Py_ssize_t)i)) return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (long long i = 0; i < n; i++) {
        memcpy(row, rows + i * (long long)sizeof row, sizeof row);
        const Figures figures = summarize_row(row);
        memcpy(out + i * (long long)sizeof figures, &figures, sizeof figures);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static int check_pair(const int64_t *row, Py_ssize_t number) {
    const int64_t baseline[ROW_WIDTH] = {row[0], row[2], row[3]}, candidate[ROW_WIDTH] = {row[1], row[2], row[4]};
    return check_row(baseline, number) && check_row(candidate, number);
}

static void measure_rows(const unsigned char *rows, long long n, unsigned char *out) {
    const unsigned before = keep_subnormals();
    for (long long i = 0; i < n; i++) {
        int64_t row[PAIR_WIDTH];
        memcpy(row, rows + i * (long long)sizeof row, sizeof row);
        const PairFigures figures = measure_pair(row);
        memcpy(out + i * (long long)sizeof figures, &figures, sizeof figures);
    }
    restore_subnormals(before);
}

static PyObject *native_measure_pairs(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    long long numbers[3];
    (void)module;
    if (!read_integers(args, given, 3, numbers)) return NULL;
    const unsigned char *rows = (const unsigned char *)(intptr_t)numbers[0];
    const long long n = numbers[1];
    int64_t row[PAIR_WIDTH];
    if (n < 0) return PyErr_Format(PyExc_ValueError, "negative number of rows: %lld", n);
    if (n && (numbers[0] <= 0 || numbers[2] <= 0)) return PyErr_Format(PyExc_ValueError, "null address");
    for (long long i = 0; i < n; i++) {
        memcpy(row, rows + i * (long long)sizeof row, sizeof row);
        if (!check_pair(row, (Py_ssize_t)i)) return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    measure_rows(rows, n, (unsigned char *)(intptr_t)numbers[2]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *native_glance(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    long long numbers[PAIR_WIDTH];
    Glance figures;
    int finite;
    (void)module;
    if (!read_integers(args, given, PAIR_WIDTH, numbers)) return NULL;
    const int64_t row[PAIR_WIDTH] = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
    if (!check_pair(row, -1)) return NULL;
    for (int side = 3; side < 5; side++) /* whole numbers may be greater than a double tells apart */
        if (formats[row[side]].mantissa_bits == INTEGRAL) Py_RETURN_NONE;
    if (kinds[row[3]].parts != kinds[row[4]].parts) Py_RETURN_NONE;
    if (row[2] * kinds[row[3]].value_size < GIL_BYTES) {
        finite = glance_at(row, &figures);
    } else {
        Py_BEGIN_ALLOW_THREADS
        finite = glance_at(row, &figures);
        Py_END_ALLOW_THREADS
    }
    if (!finite) Py_RETURN_NONE;
    return Py_BuildValue("(ddddddddd)", figures.squares_a, figures.squares_d, figures.a_times_d, figures.sum_d, figures.max_d,
                         figures.max_a, figures.different, figures.astray_1e3, figures.astray_1e2);
}

static PyObject *native_peak(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    long long numbers[ROW_WIDTH];
    uint64_t peak;
    (void)module;
    if (!read_integers(args, given, ROW_WIDTH, numbers)) return NULL;
    const int64_t row[ROW_WIDTH] = {numbers[0], numbers[1], numbers[2]};
    if (!check_row(row, -1)) return NULL;
    if (!has_peak(row[2])) return PyErr_Format(PyExc_ValueError, "dtype code without a peak: %lld", numbers[2]);
    if (row_bytes(row) < GIL_BYTES) {
        peak = peak_of(&kinds[row[2]], (const unsigned char *)(intptr_t)row[0], row[1]);
    } else {
        Py_BEGIN_ALLOW_THREADS
        peak = peak_of(&kinds[row[2]], (const unsigned char *)(intptr_t)row[0], row[1]);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromUnsignedLongLong(peak);
}

static PyObject *native_copy(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    long long numbers[3];
    (void)module;
    if (!read_integers(args, given, 3, numbers)) return NULL;
    void *to = (void *)(intptr_t)numbers[0];
    const void *from = (const void *)(intptr_t)numbers[1];
    const long long nbytes = numbers[2];
    if (nbytes < 0) return PyErr_Format(PyExc_ValueError, "negative number of bytes: %lld", nbytes);
    if (nbytes && (numbers[0] <= 0 || numbers[1] <= 0)) return PyErr_Format(PyExc_ValueError, "null address");
    if (nbytes < GIL_BYTES) {
        if (nbytes) memmove(to, from, (size_t)nbytes);
    } else {
        Py_BEGIN_ALLOW_THREADS
        memmove(to, from, (size_t)nbytes);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static int has_avx2, has_f16c;

static PyObject *native_features(PyObject *module, PyObject *ignored) {
    (void)module, (void)ignored;
    if (has_f16c) return Py_BuildValue("(ss)", "AVX2", "F16C");
    return has_avx2 ? Py_BuildValue("(s)", "AVX2") : PyTuple_New(0);
}

static int prepare_module(PyObject *module) {
#if HAVE_X86
    __builtin_cpu_init();
    has_avx2 = __builtin_cpu_supports("avx2") != 0;
    has_f16c = has_avx2 && __builtin_cpu_supports("f16c") != 0;
#endif
    prepare_blocks(has_avx2, has_f16c);
    prepare_moments(has_avx2);
    prepare_scans(has_avx2);
    return PyModule_AddIntConstant(module, "PAIR_BYTES", sizeof(PairFigures));
}

static PyMethodDef functions[] = {
    {"summarize", (PyCFunction)(void (*)(void))native_summarize, METH_FASTCALL,
     "summarize(address, count, code) -> (max, min, mean, norm, nan, inf) of one tensor"},
    {"summarize_many", (PyCFunction)(void (*)(void))native_summarize_many, METH_FASTCALL,
     "summarize_many(rows_address, n, out_address): n rows of int64 (address, count, code) to n rows of 4 doubles and 2 int64"},
    {"measure_pairs", (PyCFunction)(void (*)(void))native_measure_pairs, METH_FASTCALL,
     "measure_pairs(rows_address, n, out_address): n rows of int64 (baseline address, candidate address, count, baseline "
     "code, candidate code) to n rows of PAIR_BYTES bytes"},
    {"glance", (PyCFunction)(void (*)(void))native_glance, METH_FASTCALL,
     "glance(baseline address, candidate address, count, baseline code, candidate code) -> 9 figures of the difference, or "
     "None where a value is not finite, or numbers are whole"},
    {"peak", (PyCFunction)(void (*)(void))native_peak, METH_FASTCALL,
     "peak(address, count, code) -> the bits of the greatest magnitude, without its sign; NaN is above infinity"},
    {"copy", (PyCFunction)(void (*)(void))native_copy, METH_FASTCALL, "copy(dst_address, src_address, nbytes)"},
    {"features", native_features, METH_NOARGS, "features() -> names of the vector instructions in use"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)prepare_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Arithmetic on tensors in raw memory.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
