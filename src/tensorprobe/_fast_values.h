/* The arguments and results of a call -> its tree and its slots. arguments.py does the same, and is asked for what is no plain value. */
static PyObject *s_tree, *s_results;

/* A value as Python describes it: `side.tree(value, name)` gives (the tree as bytes, its tensors by name). */
static int put_by_python(Recording *r, Open *open, PyObject *value, const char *path, size_t n) {
    PyObject *name = PyUnicode_FromStringAndSize(path, (Py_ssize_t)n);
    PyObject *made = name == NULL ? NULL : PyObject_CallMethodObjArgs(r->parts[R_SIDE], s_tree, value, name, NULL), *tensors = NULL;
    Py_XDECREF(name);
    char *bytes;
    Py_ssize_t length;
    int failed = made == NULL || !PyTuple_Check(made) || PyTuple_Size(made) != 2 ||
                 PyBytes_AsStringAndSize(PyTuple_GetItem(made, 0), &bytes, &length) < 0 || !PyList_Check(tensors = PyTuple_GetItem(made, 1));
    if (!failed) put_bytes(&open->arguments, bytes, (size_t)length);
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(tensors); i++) {
        PyObject *pair = PyList_GetItem(tensors, i);
        Py_ssize_t text_length;
        const char *text = PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), &text_length) : NULL;
        failed = text == NULL || put_tensor(r, open, text, (size_t)text_length, PyTuple_GetItem(pair, 1));
    }
    Py_XDECREF(made);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "tree gives bytes and a list of (name, tensor)");
    return failed ? -1 : 0;
}

/* One argument, in its place in the tree. `path` has LONG_PATH characters, n of them used. */
static int put_value(Recording *r, Open *open, PyObject *value, char *path, size_t n) {
    Buffer *b = &open->arguments;
    PyTypeObject *type = Py_TYPE(value);
    if ((PyObject *)type == r->c->tensor_type || PyType_IsSubtype(type, (PyTypeObject *)r->c->tensor_type)) {
        put_map(b, 1);
        PUT_KEY(b, "slot");
        put_text(b, path, n);
        return put_tensor(r, open, path, n, value);
    }
    if (value == Py_None) return put_none(b), 0;
    if (type == &PyBool_Type) return put_bool(b, value == Py_True), 0;
    if (type == &PyUnicode_Type) return put_unicode(b, value);
    if (type == &PyFloat_Type) {
        const double number = PyFloat_AsDouble(value);
        if (isfinite(number)) return put_double(b, number), 0;
    } else if (type == &PyLong_Type) {
        int overflow;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (!overflow) return put_number(b, number), 0;
    } else if (n + 32 < LONG_PATH && (type == &PyList_Type || type == &PyTuple_Type || (PyObject *)type == r->parts[R_SIZE_TYPE])) {
        const int list = type == &PyList_Type;
        const Py_ssize_t length = list ? PyList_Size(value) : PyTuple_Size(value);
        if (!list) {
            put_map(b, 2);
            PUT_KEY(b, "type");
            if (type == &PyTuple_Type) PUT_KEY(b, "tuple");
            else PUT_KEY(b, "torch.Size");
            PUT_KEY(b, "value");
        }
        put_array(b, (size_t)length);
        for (Py_ssize_t i = 0; i < length; i++) {
            PyObject *entry = !list ? PyTuple_GetItem(value, i) : i < PyList_Size(value) ? PyList_GetItem(value, i) : Py_None;
            const size_t more = put_digits(path + n, '.', i);
            Py_INCREF(entry);
            const int failed = put_value(r, open, entry, path, n + more);
            Py_DECREF(entry);
            if (failed) return -1;
        }
        return 0;
    }
    return put_by_python(r, open, value, path, n);
}

static int put_arguments(Recording *r, Open *open, PyObject *args, PyObject *kwargs) {
    char path[LONG_PATH] = "input";
    PyObject *key, *value;
    Py_ssize_t at = 0, n = PyTuple_Size(args);
    PUT_KEY(&open->arguments, "args");
    put_array(&open->arguments, (size_t)n);
    for (Py_ssize_t i = 0; i < n; i++)
        if (put_value(r, open, PyTuple_GetItem(args, i), path, 5 + put_digits(path + 5, '.', i))) return -1;
    if (kwargs == NULL || PyDict_Size(kwargs) == 0) return 0;
    open->has_kwargs = 1;
    PUT_KEY(&open->arguments, "kwargs");
    put_map(&open->arguments, (size_t)PyDict_Size(kwargs));
    while (PyDict_Next(kwargs, &at, &key, &value)) { /* nobody else has these keywords */
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(key, &length);
        if (text == NULL) return -1;
        if ((size_t)length + 48 > LONG_PATH) return PyErr_SetString(PyExc_ValueError, "a keyword is too long"), -1;
        put_text(&open->arguments, text, (size_t)length);
        if (put_value(r, open, value, path, (size_t)snprintf(path, sizeof path, "input.kwargs.%s", text))) return -1;
    }
    return 0;
}

/* The tensors of a result. Anything but a tensor and a tuple of tensors is for Python. */
static int put_results(Recording *r, Open *open, PyObject *result) {
    char path[32] = "output";
    PyTypeObject *tensor = (PyTypeObject *)r->c->tensor_type;
    if (PyType_IsSubtype(Py_TYPE(result), tensor)) return put_tensor(r, open, "output.0", 8, result);
    Py_ssize_t n = PyTuple_Check(result) ? PyTuple_Size(result) : -1, tensors = 0;
    while (tensors < n && PyType_IsSubtype(Py_TYPE(PyTuple_GetItem(result, tensors)), tensor)) tensors++;
    if (n >= 0 && tensors == n) {
        for (Py_ssize_t i = 0; i < n; i++)
            if (put_tensor(r, open, path, 6 + put_digits(path + 6, '.', i), PyTuple_GetItem(result, i))) return -1;
        return 0;
    }
    PyObject *found = PyObject_CallMethodObjArgs(r->parts[R_SIDE], s_results, result, NULL);
    int failed = found == NULL || !PyList_Check(found);
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(found); i++) {
        PyObject *pair = PyList_GetItem(found, i);
        Py_ssize_t length;
        const char *text = PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), &length) : NULL;
        failed = text == NULL || put_tensor(r, open, text, (size_t)length, PyTuple_GetItem(pair, 1));
    }
    Py_XDECREF(found);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "results is a list of (name, tensor)");
    return failed ? -1 : 0;
}
