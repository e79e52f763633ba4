/* The greatest magnitude in tensors: the watch for overflow asks for it after every call. Included by _fast.c. */
/* What `greatest` needs to know, once for each watch: the types, and for each dtype its code and the first peak of interest. */
#define SCANNER "tensorprobe.capture.scanner"

typedef struct {
    Context asked; /* the types and the methods of it */
    struct {
        int64_t code;
        uint64_t alarm;
    } rows[DTYPES];
} Scanner;

static void free_scanner(PyObject *capsule) {
    Scanner *scanner = PyCapsule_GetPointer(capsule, SCANNER);
    if (scanner != NULL) drop_context(&scanner->asked); /* its first member: that gives back all of it */
}

static int fill_scanner(Scanner *scanner, PyObject *tensor, PyObject *parameter, PyObject *dtypes) {
    Context *c = &scanner->asked;
    PyObject *key, *row;
    Py_ssize_t at = 0, n = 0;
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    c->tensor_type = tensor;
    c->parameter_type = parameter;
    c->dtypes = PyDict_New(); /* dtype -> number of its row here */
    if (c->dtypes == NULL) return -1;
    for (int i = 0; i < METHODS; i++)
        if ((c->methods[i] = find_method(tensor, i)) == NULL) return -1;
    while (PyDict_Next(dtypes, &at, &key, &row)) {
        long long code;
        unsigned long long alarm;
        if (!PyTuple_Check(row) || !PyArg_ParseTuple(row, "LK", &code, &alarm)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a dtype needs a tuple of its code and its alarm");
            return -1;
        }
        if (n == DTYPES || code < 0 || code >= DTYPES || !has_peak(code)) {
            PyErr_Format(PyExc_ValueError, "dtype code without a peak: %lld", code);
            return -1;
        }
        scanner->rows[n].code = code;
        scanner->rows[n].alarm = alarm;
        PyObject *number = PyLong_FromSsize_t(n++);
        const int failed = number == NULL || PyDict_SetItem(c->dtypes, key, number);
        Py_XDECREF(number);
        if (failed) return -1;
    }
    return 0;
}

/* scanner(tensor_type, parameter_type, {dtype: (code, alarm)}) */
static PyObject *make_scanner(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensor, *parameter, *dtypes;
    if (!PyArg_ParseTuple(args, "O!O!O!:scanner", &PyType_Type, &tensor, &PyType_Type, &parameter, &PyDict_Type, &dtypes)) return NULL;
    Scanner *scanner = PyMem_Calloc(1, sizeof *scanner);
    if (scanner == NULL) return PyErr_NoMemory();
    PyObject *capsule = fill_scanner(scanner, tensor, parameter, dtypes) ? NULL : PyCapsule_New(scanner, SCANNER, free_scanner);
    if (capsule == NULL) drop_context(&scanner->asked);
    return capsule;
}

static double magnitude_of(int64_t code, uint64_t peak) {
    double wide;
    switch (code) {
    case FLOAT64: case COMPLEX128: memcpy(&wide, &peak, sizeof wide); return wide;
    case FLOAT32: case COMPLEX64: return float_of_bits((uint32_t)peak);
    case BFLOAT16: return float_of_bits((uint32_t)peak << 16);
    case FLOAT16: case COMPLEX32: return float_of_half((uint16_t)peak);
    default: return float8_values[code - E4M3FN][peak & 0x7f];
    }
}

#define MOST_DIMENSIONS 16

/* Whether strides permute a block without holes or overlap: 1 or 0, -1 on error. */
static int is_dense(const Context *c, PyObject *tensor) {
    PyObject *shape = PyObject_GetAttr(tensor, s_shape), *stride = shape == NULL ? NULL : ask(c, STRIDE, tensor);
    long long sizes[MOST_DIMENSIONS], steps[MOST_DIMENSIONS];
    unsigned long long expected = 1;
    int used = 0, dense = stride == NULL ? -1 : 0;
    if (stride != NULL && PyTuple_Check(shape) && PyTuple_Check(stride) && PyTuple_Size(shape) == PyTuple_Size(stride) &&
        PyTuple_Size(shape) <= MOST_DIMENSIONS) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(shape); i++) { /* sorted by stride as they come; those of size 1 do not count */
            const long long size = PyLong_AsLongLong(PyTuple_GetItem(shape, i)), step = PyLong_AsLongLong(PyTuple_GetItem(stride, i));
            if (size == 1) continue;
            int at = used++;
            for (; at > 0 && steps[at - 1] > step; at--) steps[at] = steps[at - 1], sizes[at] = sizes[at - 1];
            steps[at] = step;
            sizes[at] = size;
        }
        dense = 1;
        for (int i = 0; i < used && dense; expected *= (unsigned long long)sizes[i++]) dense = (unsigned long long)steps[i] == expected;
        if (PyErr_Occurred()) dense = -1;
    }
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    return dense;
}

/* 1: looked at, the magnitude is in `greatest`. 0: of interest, or needs care. -1: an error. */
static int look_at(const Scanner *scanner, PyObject *tensor, double *greatest) {
    const Context *c = &scanner->asked;
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != c->tensor_type && type != c->parameter_type) return 0;
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
    if (dtype == NULL) return -1;
    PyObject *number = PyDict_GetItemWithError(c->dtypes, dtype);
    Py_DECREF(dtype);
    if (number == NULL) return PyErr_Occurred() ? -1 : 1;
    const Py_ssize_t at = PyLong_AsSsize_t(number);
    const int64_t code = scanner->rows[at].code;
    unsigned long long address, count;
    const int here = is_true(PyObject_GetAttr(tensor, s_is_cpu));
    int dense = here == 1 ? is_true(ask(c, IS_CONTIGUOUS, tensor)) : 0;
    if (here == 1 && dense == 0) dense = is_dense(c, tensor);
    if (here != 1 || dense != 1) return PyErr_Occurred() ? -1 : 0;
    if (ask_number(c, NUMEL, tensor, &count)) return -1;
    if (count == 0) return 1;
    if (ask_number(c, CONST_DATA_PTR, tensor, &address)) return -1;
    if (address < LOW_ADDRESSES) return 0;
    const Kind *kind = &kinds[code];
    const unsigned char *bytes = (const unsigned char *)(uintptr_t)address;
    uint64_t peak;
    if (count * (unsigned long long)kind->value_size < LARGE_BYTES) {
        peak = peak_of(kind, bytes, (int64_t)count);
    } else {
        Py_BEGIN_ALLOW_THREADS
        peak = peak_of(kind, bytes, (int64_t)count);
        Py_END_ALLOW_THREADS
    }
    if (peak >= scanner->rows[at].alarm) return 0;
    const double found = magnitude_of(code, peak);
    if (found > *greatest) *greatest = found;
    return 1;
}

/* greatest(scanner, [tensor or None]) -> magnitude, or None where Python has to look itself. The caller holds the tensors. */
static PyObject *greatest(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 2 || !(PyList_Check(args[1]) || PyTuple_Check(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "greatest(scanner, list or tuple of tensors)");
        return NULL;
    }
    Scanner *scanner = PyCapsule_GetPointer(args[0], SCANNER);
    if (scanner == NULL) return NULL;
    const int list = PyList_Check(args[1]);
    double found = 0;
    for (Py_ssize_t i = 0; i < (list ? PyList_Size(args[1]) : PyTuple_Size(args[1])); i++) {
        PyObject *tensor = list ? PyList_GetItem(args[1], i) : PyTuple_GetItem(args[1], i);
        if (tensor == Py_None) continue;
        Py_INCREF(tensor);
        const int done = look_at(scanner, tensor, &found);
        Py_DECREF(tensor);
        if (done < 0 && !PyErr_ExceptionMatches(PyExc_RuntimeError)) return NULL;
        if (done < 0) PyErr_Clear(); /* of torch: a tensor without strides, or without memory of its own */
        if (done <= 0) Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(found);
}
