/* The backward of a call whose gradients come all at once, to the same message as `Session.emit_backward`. */
static PyObject *s_module, *s_parent, *s_stack, *s_thread;

/* An attribute that is left out of the message where it is None, empty or 0. */
static PyObject *about_of(PyObject *event, PyObject *name) {
    PyObject *value = PyObject_GetAttr(event, name);
    if (value != NULL && PyObject_IsTrue(value) != 1 && !PyLong_Check(value)) Py_CLEAR(value);
    if (value == Py_None) Py_CLEAR(value);
    return value;
}

/* record_backward(recording, event, repeat, {slot: role}, [(slot, gradient)]): a backward all of whose gradients are here. */
static PyObject *record_backward(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 5 || !PyLong_Check(args[2]) || !PyDict_Check(args[3]) || !PyList_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "record_backward(recording, event, number, dict, list of (name, tensor))");
        return NULL;
    }
    Recording *r = PyCapsule_GetPointer(args[0], RECORDING);
    if (r == NULL) return NULL;
    PyObject *event = args[1], *thread = PyObject_GetAttr(event, s_thread);
    Call call = {.start = -1, .number = -1, .repeat = PyLong_AsLongLong(args[2]), .name = PyObject_GetAttr(event, s_name)};
    int failed = thread == NULL || call.name == NULL;
    if (!failed) call.ordinal = PyLong_AsLongLong(thread);
    Py_XDECREF(thread);
    if (!failed) {
        call.module = about_of(event, s_module);
        call.parent = about_of(event, s_parent);
        call.phase = about_of(event, s_phase);
        call.stack = about_of(event, s_stack);
        call.microbatch = about_of(event, s_microbatch);
        failed = PyErr_Occurred() != NULL;
    }
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(args[4]); i++) {
        PyObject *pair = PyList_GetItem(args[4], i);
        Py_ssize_t length;
        const char *path = PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(pair, 0), &length) : NULL;
        failed = path == NULL;
        if (failed) break;
        Py_INCREF(pair);
        PyObject *role = kept(PyDict_GetItemWithError(args[3], PyTuple_GetItem(pair, 0)));
        int done = put_plain(r, &call.open, path, (size_t)length, PyTuple_GetItem(pair, 1), role);
        if (done == 0) done = put_with_care(r, &call.open, path, (size_t)length, PyTuple_GetItem(pair, 1), role);
        failed = done < 0;
        Py_XDECREF(role);
        Py_DECREF(pair);
    }
    if (!failed) failed = send_call(r, &call, NULL);
    drop_call(&call);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a gradient is (name, tensor)");
    if (failed) return NULL;
    Py_RETURN_NONE;
}
